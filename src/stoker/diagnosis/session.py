"""``stoker.watch()``: the report of ``stoker run``, for a notebook or for part of a script."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from ..core.errors import UsageError
from ..core.monitor import SystemMonitor
from ..core.types import JsonObject
from .report import html, inline, text
from .report.build import report_of
from .report.schema import RunReport
from .watch import patch


class _Printer(Protocol):
    """IPython's pretty printer."""

    def text(self, obj: str, /) -> object: ...


class Session:
    """Watches every DataLoader that is iterated until the session ends.

    Args:
        named: rewrites file names. It takes a text that contains some (the report as JSON, the ``live`` line) and
            returns the text to use.

    Attributes:
        report: the report, in the format of ``stoker run`` (docs/report.md); None until the session ends.
    """

    _is_running = False  # only one can run at a time

    def __init__(self, named: Callable[[str], str] | None = None) -> None:
        self._named = named
        self.report: JsonObject | None = None
        self._report: RunReport | None = None
        if Session._is_running:
            raise UsageError("another stoker.watch() has not ended yet: call its stop()")
        self._watch = patch.share()
        Session._is_running = True
        if not self._watch.listened:  # else the counters belong to ``stoker run``
            self._watch.forget()
        self._monitor = SystemMonitor()
        self._began = time.monotonic()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def live(self) -> str:
        """Returns the loops' progress as one line, for a display that is redrawn while they run. Thread-safe."""
        line = inline.progress(self._watch.live(), time.monotonic() - self._began)
        return line if self._named is None else self._named(line)

    def stop(self) -> Session:
        """Ends the session. Calling it again does nothing."""
        self._ended()
        return self

    def save(self, path: str | Path) -> None:
        """Ends the session and writes its report as a single HTML page (needs stoker[html]).

        Raises:
            UsageError: ``path`` cannot be written, or jinja2 is not installed.
        """
        html.check(Path(path))
        html.save(self._ended(), Path(path))

    def _ended(self) -> RunReport:
        if self._report is None:
            snapshot = json.loads(json.dumps(self._watch.snapshot(True), default=str))
            applied = self._watch.apply and not self._watch.listened
            Session._is_running = False
            patch.end(self._watch)
            wall_s = time.monotonic() - self._began
            report = report_of(["watch()"], 0, [snapshot], self._monitor.stop(), wall_s, applied)
            if self._named is not None:
                text = self._named(json.dumps(report.as_dict()))
                report = msgspec.json.decode(text, type=RunReport)
            self._report = report
            self.report = self._report.as_dict()
        return self._report

    def __str__(self) -> str:
        return text.render(self._ended(), None, sys.stdout).strip()

    def __repr__(self) -> str:
        """A short form for debuggers and logs, which must not end the session. Notebooks use ``_repr_pretty_``."""
        if self._report is None:
            return "<stoker.watch(): watching; print() or stop() ends it>"
        return f"<stoker.watch(): {self._report.verdict}, {len(self._report.loaders)} loaders; print() shows it>"

    def _repr_html_(self) -> str:
        return inline.render(self._ended())

    def _repr_pretty_(self, printer: _Printer, cycle: bool) -> None:
        printer.text(repr(self) if cycle else str(self))


def watch() -> Session:
    """Watches the DataLoaders of this process, torch's own and stoker's, until the session ends.

    Printing the session, or leaving it as a notebook cell's last line, ends it and shows the report. Only one session
    can run at a time. It does not see iterators created before it began, nor inside workers that are not forked.

    Raises:
        UsageError: another session is still running.

    Example:
        >>> with stoker.watch() as w:  # doctest: +SKIP
        ...     train_one_epoch(loader)
        >>> w  # doctest: +SKIP
    """
    return Session()
