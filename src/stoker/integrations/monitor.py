"""``DataMonitor``: the ``data/*`` numbers of this process's loaders, for training loops and callbacks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from ..core.warn import warn_user
from ..diagnosis.report.merge import snapshots
from . import numbers
from .loggers import Sender, sender
from .numbers import CODES, Numbers, Totals

if TYPE_CHECKING:
    from ..diagnosis.watch.watch import ProcessWatch

TIMEOUT_S = 300.0  # long enough for a rank that writes a checkpoint; torch's own groups wait half an hour
DROPPED_S = 1.0  # how long to wait until torch drops the tensors


class DataMonitor:
    """Measures how long a training loop waits for data. Each reading covers the time since the previous one.

    Covers torch's loaders and stoker's, with or without ``stoker run``, but only iterators created after the monitor.
    A monitor never ends a training: if it cannot measure or send, it warns once, with a ``StokerWarning``.

    In a distributed training each rank needs a monitor, and all ranks must call it at the same step. Rank 0 then gets
    the numbers of all ranks.

    Args:
        to: where ``log`` sends: a TensorBoard ``SummaryWriter``, a W&B run, the module ``mlflow``, or a Lightning
            logger. It may also be a function that creates one of them; if that raises, the training goes on without
            logging. With None, only ``read`` is of use.
        timeout_s: seconds after which a rank stops waiting for the numbers of the others, for good.

    Raises:
        UsageError: ``to`` is not a known logger.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> with DataMonitor() as monitor:
        ...     for batch in DataLoader(range(64), batch_size=2):
        ...         pass
        ...     sorted(monitor.read())
        ['data/failed_samples', 'data/samples_per_s', 'data/verdict', 'data/wait_pct', 'data/wait_s', 'data/workers']
    """

    def __init__(self, to: object | Callable[[], object] | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._said: set[str] = set()
        self._measured = False
        self._alone = False  # the ranks' numbers are no longer gathered
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None
        self._made_in: object = None  # the default group when ``_group`` was made: a script may replace its own
        self._send = self._opened(to)
        self._watch = self._begin()
        self._before: dict[str, Totals] = {}
        self._counted: object = None  # the watch's counters from which ``_before`` was read
        if self._watch is not None:
            self._row()  # earlier counts do not matter

    def __enter__(self) -> DataMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> dict[str, float | str]:
        """Returns the numbers since the last call (docs/loggers.md). Empty without batches, and in ranks above 0."""
        rows = self._of_all_ranks(self._row())
        if not _is_first():
            return {}
        values = numbers.combined(rows)
        if values:
            self._measured = True
        elif not self._measured:
            self.say("no batch of a DataLoader was seen yet, so there are no data/* numbers to log")
        return values

    def log(self, step: int | None = None) -> None:
        """Reads the numbers and sends them to ``to``. If sending fails, warns and sends nothing from then on.

        Args:
            step: the training step. With None, the logger counts steps itself; W&B adds the numbers to the next log.
        """
        values = self.read()
        if not values or self._send is None:
            return
        try:
            self._send(values, step)
        except Exception as e:
            self._send = None
            self.say(f"data/* is no longer logged: {_sentence(e)}")

    def close(self) -> None:
        """Stops counting. Calling it again does nothing."""
        if self._watch is not None:
            from ..diagnosis.watch import patch

            patch.end(self._watch)
            self._watch = None

    def say(self, text: str) -> None:
        """Warns the user, once per text."""
        if text not in self._said:
            self._said.add(text)
            warn_user(text)

    def _opened(self, to: object) -> Sender | None:
        if to is None or not _is_first():
            return None
        if callable(to) and not hasattr(to, "log") and not hasattr(to, "add_scalar"):
            try:
                to = cast(Callable[[], object], to)()
            except Exception as e:
                self.say(f"data/* is not logged: {_sentence(e)}")
                return None
        return sender(to)

    def _begin(self) -> ProcessWatch | None:
        if not sys.platform.startswith("linux"):
            self.say("loaders are measured on Linux only, so there are no data/* numbers to log")
            return None
        from ..diagnosis.watch import patch

        return patch.share()

    def _row(self) -> list[float]:
        """Returns the numbers since the last call, followed by the verdict's code."""
        nothing = [*Numbers(), CODES["unknown"]]
        if self._watch is None:
            return nothing
        try:
            processes = snapshots([json.loads(json.dumps(self._watch.snapshot(False), default=str))])
            now = numbers.totals(processes[0].loaders)
            before = self._before if self._watch.loaders is self._counted else {}  # a new session resets the counters
            self._before, self._counted = now, self._watch.loaders
            found = numbers.between(before, now)
            return nothing if found is None else [*found, CODES[numbers.verdict(processes)]]
        except Exception as e:  # a training must not fail because it is measured
            self.say(f"the loaders cannot be measured: {_sentence(e)}")
            return nothing

    def _of_all_ranks(self, row: list[float]) -> list[list[float]]:
        """Returns the rows of all ranks, in rank order; only this one's with a single rank, or once a rank did not call
        in time. The rows are CPU tensors in a separate gloo group, so gathering never waits for the device."""
        if self._alone or _world() == 1:
            return [row]
        try:
            if self._group is None or self._made_in is not dist.group.WORLD:
                self._group = dist.new_group(backend="gloo", timeout=self._timeout)
                self._made_in = dist.group.WORLD
            return _gathered(row, self._group)
        except Exception as e:  # torch raises several types
            self._alone = True
            why = str(e).strip().partition("\n")[0] or type(e).__name__
            self.say(f"the numbers of all ranks cannot be collected, so each rank logs its own: {why}")
            return [row]


def _gathered(row: list[float], group: dist.ProcessGroup) -> list[list[float]]:
    """Collects the rows of all ranks. A thread of torch's drops the tensors after the call, which needs Python's lock.
    If Python exits at that moment, the process aborts, so this waits for the thread. Raises what torch raises."""
    out = [torch.empty(len(row), dtype=torch.float64) for _ in range(_world())]
    tensors = [*out, torch.tensor(row, dtype=torch.float64)]
    before = sum(map(sys.getrefcount, tensors))
    error = None
    try:
        dist.all_gather(out, tensors[-1], group=group)
    except Exception as e:
        error = e.with_traceback(None)  # whose frames hold the tensors
    end = time.monotonic() + DROPPED_S
    while sum(map(sys.getrefcount, tensors)) > before and time.monotonic() < end:
        time.sleep(0.001)
    if error is not None:
        raise error
    return [x.tolist() for x in out]


def _world() -> int:
    """Returns the number of ranks; 1 if torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _is_first() -> bool:
    return _world() == 1 or dist.get_rank() == 0


def _sentence(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"
