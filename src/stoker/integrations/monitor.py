"""``DataMonitor``: the ``data/*`` numbers of this process' loaders, for a training loop and for callbacks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, cast

from ..core.warn import warn_user
from ..diagnosis.report.merge import snapshots
from . import numbers, ranks
from .loggers import Sender, sender
from .numbers import CODES, Numbers, Totals

if TYPE_CHECKING:
    from ..diagnosis.watch.watch import ProcessWatch


class DataMonitor:
    """Says how long a training loop waits for data, every time it is asked, about the time since it was asked last.

    It counts torch's loaders and stoker's, with and without ``stoker run``. Only iterators made after it are seen.
    Nothing in here ends a training: what cannot be measured or sent is said once, as a ``StokerWarning``.

    In a distributed training each rank needs one, and all ranks have to ask at the same step. Rank 0 then gets the
    numbers of all ranks.

    Args:
        to: where ``log`` sends: a ``SummaryWriter`` of TensorBoard, a run of W&B, the module ``mlflow``, or a logger
            of Lightning; or a function that makes one of them. If that fails, the training goes on without. None:
            there is only ``read``.
        timeout_s: seconds after which a rank stops to wait for the numbers of the others, once and for all.

    Raises:
        UsageError: ``to`` is nothing that is known.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> with DataMonitor() as monitor:
        ...     for batch in DataLoader(range(64), batch_size=2):
        ...         pass
        ...     sorted(monitor.read())
        ['data/failed_samples', 'data/samples_per_s', 'data/verdict', 'data/wait_pct', 'data/wait_s', 'data/workers']
    """

    def __init__(self, to: object | Callable[[], object] | None = None, *, timeout_s: float = ranks.TIMEOUT_S) -> None:
        self._said: set[str] = set()
        self._measured = False
        self._gather = ranks.RankGather(timeout_s)
        self._send = self._opened(to)
        self._watch = self._begin()
        self._before: dict[str, Totals] = {}
        self._counted: object = None  # the counters that these are of
        if self._watch is not None:
            self._row()  # what was before does not count

    def __enter__(self) -> DataMonitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def read(self) -> dict[str, float | str]:
        """The numbers since the last call (docs/loggers.md). Empty in ranks but the first, and where no batch came."""
        rows = self._gather(self._row())
        if self._gather.failure:
            self.say(f"the numbers of all ranks cannot be collected, so each has its own: {self._gather.failure}")
        if not ranks.is_first():
            return {}
        values = numbers.combined(rows)
        if values:
            self._measured = True
        elif not self._measured:
            self.say("no batch of a DataLoader was seen yet, so there are no data/* numbers to log")
        return values

    def log(self, step: int | None = None) -> None:
        """Reads, and sends to ``to``. The first failure is the last: it is said, and nothing is sent any more.

        Args:
            step: of the training. None: the logger counts itself, or it goes with what is logged next (W&B).
        """
        values = self.read()
        if not values or self._send is None:
            return
        try:
            self._send(values, step)
        except Exception as e:
            self._send = None
            self.say(f"data/* is not logged any more: {_sentence(e)}")

    def close(self) -> None:
        """Ends counting. May be called twice."""
        if self._watch is not None:
            from ..diagnosis.watch import patch

            patch.end(self._watch)
            self._watch = None

    def say(self, text: str) -> None:
        """Warns, once."""
        if text not in self._said:
            self._said.add(text)
            warn_user(text)

    def _opened(self, to: object) -> Sender | None:
        if to is None or not ranks.is_first():
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
        """The numbers since the last call, and the verdict's code."""
        nothing = [*Numbers(), CODES["unknown"]]
        if self._watch is None:
            return nothing
        try:
            processes = snapshots([json.loads(json.dumps(self._watch.snapshot(False), default=str))])
            now = numbers.totals(processes[0].loaders)
            before = self._before if self._watch.loaders is self._counted else {}  # a session has begun anew
            self._before, self._counted = now, self._watch.loaders
            found = numbers.between(before, now)
            return nothing if found is None else [*found, CODES[numbers.verdict(processes)]]
        except Exception as e:  # a training must not fail because it is measured
            self.say(f"the loaders cannot be measured: {_sentence(e)}")
            return nothing


def _sentence(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"
