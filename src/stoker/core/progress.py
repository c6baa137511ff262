"""What a command that measures says while it does."""

from __future__ import annotations

import os
import sys
import time

from . import terminal

QUIET_S = 2.0  # nothing is said about what is over sooner


class Progress:
    """One line that changes, on a terminal; elsewhere one line when it takes longer than two seconds.

    Args:
        name: of what is measured.
        budget_s: seconds it may take; None where nothing bounds it.
    """

    def __init__(self, name: str, budget_s: float | None = None) -> None:
        self._name, self._budget_s = name, budget_s
        self._began = time.monotonic()
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._said = False

    def __call__(self, words: str) -> None:
        took = time.monotonic() - self._began
        if self._live:
            of = "" if self._budget_s is None else f" of {self._budget_s:g}"
            line = f"stoker: {took:4.1f}{of} s  {words}"
            sys.stderr.write("\r\033[K" + line[: terminal.width(sys.stderr) - 1])
            sys.stderr.flush()
        elif took > QUIET_S and not self._said:
            self._said = True
            limit = "" if self._budget_s is None else f", up to {self._budget_s:g} s"
            sys.stderr.write(f"stoker: measuring {self._name}{limit}: {words}\n")

    def end(self) -> None:
        if self._live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
