"""``stoker run --live``: one line about the loaders while the script runs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from ...core import terminal

EVERY_S = 1.0
SELDOM = 10  # ticks between two lines where there is no terminal


class Ticker:
    """A thread that says how the busiest loader is doing.

    Args:
        look: all loaders as they are now, by name: the report's ``metrics`` fields, sums since the beginning.
    """

    def __init__(self, look: Callable[[], dict[str, dict[str, Any]]]) -> None:
        self._look = look
        self._before: dict[str, dict[str, Any]] = {}
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stoker_live", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        ticks = 0
        while not self._stop.wait(EVERY_S):
            ticks += 1
            if not self._live and ticks % SELDOM:
                continue
            line = self.line(self._look())
            if line:
                end = "" if self._live else "\n"
                start = "\r\033[K" if self._live else ""
                sys.stderr.write(start + line[: terminal.width(sys.stderr) - 1] + end)
                sys.stderr.flush()

    def line(self, now: dict[str, dict[str, Any]]) -> str:
        """What happened since the last time; empty where nothing did.

        Args:
            now: see ``look``.
        """
        before, self._before = self._before, now
        moved = []
        for name, m in now.items():
            old = before.get(name, {})
            wait, step, batches, samples = (m[k] - old.get(k, 0) for k in ("wait_s", "step_s", "batches", "samples"))
            if batches > 0 and wait + step > 0:
                moved.append((wait + step, name, wait, samples, m))
        if not moved:
            return ""
        took, name, wait, samples, m = max(moved, key=lambda x: x[0])
        weight = sum(m.get("worker_pss", {}).values())
        memory = f", {terminal.human_bytes(weight)}" if weight else ""
        workers = m.get("settings", {}).get("num_workers", "?")
        short = name.replace("\\", "/").rsplit("/", 1)[-1]
        share = wait / took
        return f"stoker: {short}: {samples / took:,.0f} samples/s, waits {share:.0%}, {workers} workers{memory}"

    def stop(self) -> None:
        """Takes the line away."""
        self._stop.set()
        self._thread.join()
        if self._live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
