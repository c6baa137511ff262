"""The CUDA calls behind page-locked slots: locking existing memory, and finding out when all copies from it are done.

torch can do neither for memory that it did not allocate. The runtime's cudaHostRegister, through
``torch.cuda.cudart()``, locks it. A *fence* is an event after all work submitted to any stream so far: the driver's
cuCtxRecordEvent (CUDA 12.5; "records in hEvent all the activities of the context"). With an older driver nothing is
locked, and batches are copied to page-locked memory, as in torch.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import torch

PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process
NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
NOT_READY = 600  # CUDA_ERROR_NOT_READY
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


Event: TypeAlias = tuple[int, ctypes.c_void_p]
"""Device and event."""


class Cuda:
    """The runtime of NVIDIA's devices. Tests use a fake that counts calls and fails on demand. Raises RuntimeError if
    CUDA is not available."""

    def __init__(self) -> None:
        torch.cuda.init()
        self._runtime = torch.cuda.cudart()
        self._owner = os.getpid()
        self._driver = _Driver.load()

    def register(self, address: int, nbytes: int) -> str:
        """Locks pages. Returns the reason for a failure, or ""."""
        if self._driver is None:
            return "the driver is older than CUDA 12.5"
        code = int(self._runtime.cudaHostRegister(address, nbytes, PORTABLE))
        if not code:
            return ""
        self._consume()
        return f"cudaHostRegister of {nbytes:,} bytes: error {code}"

    def unregister(self, address: int) -> None:
        if os.getpid() != self._owner:  # CUDA cannot be used in a forked child, and there is nothing to unlock
            return
        with self._relaxed():
            if int(self._runtime.cudaHostUnregister(address)):
                self._consume()

    def fence(self) -> Fence | None:
        """Returns a fence after all work submitted so far; None if none can be set now."""
        if self._driver is None:
            return None
        return self._driver.fence([i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)])  # type: ignore[attr-defined]

    def _consume(self) -> None:
        """Clears the error of a failed call, which the next kernel launch would otherwise report."""
        last = _symbol("cudaGetLastError")
        if last is not None:
            last()

    @contextmanager
    def _relaxed(self) -> Iterator[None]:
        """Allows unregistering memory while this thread captures a graph; the capture would fail otherwise."""
        exchange = _symbol("cudaThreadExchangeStreamCaptureMode")
        mode = ctypes.c_int(RELAXED)
        if exchange is not None:
            exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            if exchange is not None:
                exchange(ctypes.byref(mode))


class _Driver:
    """The driver's cuCtxRecordEvent; ``load`` returns None if the driver lacks it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._cuda = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._free: dict[int, list[ctypes.c_void_p]] = {}

    @classmethod
    def load(cls) -> _Driver | None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            for name in ("cuCtxRecordEvent", "cuEventQuery", "cuEventCreate", "cuDevicePrimaryCtxRetain"):
                getattr(library, name)
        except (OSError, AttributeError):
            return None
        return cls(library)

    def fence(self, devices: list[int]) -> Fence | None:
        events: list[Event] = []
        for device in devices:
            event = self._event(device)
            code = -1 if event is None else self._cuda.cuCtxRecordEvent(self._contexts[device], event)
            if event is None or code:  # for instance during graph capture; the caller tries again later
                self.give_back([*events, *([] if event is None else [(device, event)])])
                return None
            events.append((device, event))
        return Fence(self, self._cuda, events)

    def give_back(self, events: list[Event]) -> None:
        for device, event in events:
            self._free[device].append(event)

    def _event(self, device: int) -> ctypes.c_void_p | None:
        if device not in self._contexts:
            context = ctypes.c_void_p()
            if self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
                return None
            self._contexts[device], self._free[device] = context, []
        if self._free[device]:
            return self._free[device].pop()
        event, before = ctypes.c_void_p(), ctypes.c_void_p()
        if self._cuda.cuCtxPushCurrent_v2(self._contexts[device]):
            return None
        try:
            failed = self._cuda.cuEventCreate(ctypes.byref(event), NO_TIMING)
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(before))
        return None if failed else event


class Fence:
    """A point in the work submitted to the devices."""

    def __init__(self, driver: _Driver, library: ctypes.CDLL, events: list[Event]) -> None:
        self._driver, self._cuda, self._events = driver, library, events

    def done(self) -> bool:
        """Whether all work before the fence is done."""
        if any(self._cuda.cuEventQuery(event) == NOT_READY for _, event in self._events):
            return False
        self._end()
        return True

    def wait(self) -> None:
        for _, event in self._events:
            self._cuda.cuEventSynchronize(event)
        self._end()

    def _end(self) -> None:
        self._driver.give_back(self._events)
        self._events = []


@functools.cache
def _symbol(name: str) -> Callable[..., int] | None:
    """Returns a function of the CUDA runtime that this process has loaded; None if it was not found."""
    for library in (None, *_loaded("libcudart")):
        with suppress(OSError, AttributeError):
            found: Callable[..., int] = getattr(ctypes.CDLL(library), name)
            return found
    return None


def _loaded(name: str) -> list[str]:
    try:
        with open("/proc/self/maps") as file:
            return sorted({line.split()[-1] for line in file if f"/{name}" in line})
    except OSError:
        return []
