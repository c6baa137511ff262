"""Pins batches: a thread copies them to page-locked memory, as in torch.

The thread sits between pool and scheduler. It pins a batch while the consumer computes, and a slot is free again as
soon as its batch is copied.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..core.nested import pin
from ..core.processes import LEAVE_S
from ..core.types import Batch
from ..device import accelerator
from ..workers import native_threads
from ..workers.exceptions import Caught
from ..workers.protocol import LocalBatch, Pool, Result, WorkerReply
from .torch_messages import torch_message

POLL_S = 0.1  # maximum delay until the thread notices that it must end


class PinnedPool:
    """A pool whose results are in page-locked memory. Once it exists, nothing else may call ``pool.receive``."""

    def __init__(self, pool: Pool, device: str | None) -> None:
        self._pool, self._device = pool, device
        # what pinning does not change
        self.submit, self.resume, self.retire = pool.submit, pool.resume, pool.retire
        self.resize, self.alive, self.finish = pool.resize, pool.alive, pool.finish
        self._out: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._index = accelerator.current_index()
        self.thread = threading.Thread(target=self._run, name="stoker_pin", daemon=True)
        self.thread.start()

    @property
    def ahead(self) -> int:
        return self._pool.ahead

    def receive(self, timeout: float | None, worker: int | None = None) -> Result | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = 5.0 if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                item = self._out.get(timeout=left)
            except queue.Empty:
                if deadline is not None:
                    return None
                if not self.thread.is_alive():
                    raise RuntimeError(torch_message(_MultiProcessingDataLoaderIter._get_data, "Pin memory")) from None
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def close(self) -> None:
        self._ending.set()
        if threading.current_thread() is not self.thread:
            self.thread.join(LEAVE_S)  # a copy that hangs in the driver must not hang the exit
        self._pool.close()

    def _run(self) -> None:
        native_threads.cap_thread()  # the copy must not take every core from the consumer
        with contextlib.suppress(RuntimeError):
            accelerator.set_index(self._index)
        while not self._ending.is_set():
            try:
                result = self._pool.receive(POLL_S)
            except BaseException as e:  # the consumer raises it
                self._out.put(e)
                continue
            if result is not None:
                self._out.put(result if result.ended else self._pin(result))

    def _pin(self, result: Result) -> Result:
        try:
            taken = result.take()
        except Exception:
            return _made(result, self._error())
        data = taken.data if type(taken) is WorkerReply else taken
        try:
            if not isinstance(data, ExceptionWrapper):
                data = pin(data, self._device)
        except Exception:
            data = self._error()
        return _made(result, taken._replace(data=data) if type(taken) is WorkerReply else data)

    def _error(self) -> Caught:
        return Caught(f"in pin memory thread for device {self._index}")


def _made(result: Result, data: Batch) -> LocalBatch:
    """The same result with another batch."""
    return LocalBatch(result.worker, result.epoch, result.task, result.ended, result.times, result.nbytes, data)
