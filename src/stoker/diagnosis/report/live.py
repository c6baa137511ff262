"""``stoker run --live``: one line about the loaders while the script runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from ...core import terminal
from ...core.types import JsonObject

EVERY_S = 1.0
SUMS = ("wait_s", "step_s", "batches", "samples")
SELDOM = 10  # ticks between two lines where there is no terminal
Read = Callable[[], dict[str, JsonObject]]  # the metrics of all loaders, by name


class Ticker:
    """A thread that says once a second how the busiest loader is doing.

    Args:
        read: returns all loaders as they are now, by name: fields of ``LoaderMetrics``, sums since the beginning.
    """

    def __init__(self, read: Read) -> None:
        from rich.console import Console

        self._read = read
        self._before: dict[str, JsonObject] = {}
        self._console = Console(stderr=True)
        self._live = sys.stderr.isatty() and not self._console.is_dumb_terminal
        self._ticks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stoker_live", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.tick()

    def tick(self) -> None:
        """Called once in ``EVERY_S``."""
        self._ticks += 1
        if not self._live and self._ticks % SELDOM:
            return
        line = self.line()
        if line:
            from rich.text import Text

            self._clear()
            text = Text(line, no_wrap=True, overflow="ellipsis")
            self._console.print(text, end="" if self._live else "\n", soft_wrap=not self._live)

    def line(self) -> str:
        """What happened since the last time; empty where nothing did."""
        before, self._before = self._before, self._read()
        busiest, added = "", dict.fromkeys((*SUMS, "took_s"), 0.0)
        for name, now in self._before.items():
            moved = {key: now[key] - before.get(name, {}).get(key, 0) for key in SUMS}
            moved["took_s"] = moved["wait_s"] + moved["step_s"]
            if moved["batches"] > 0 and moved["took_s"] > added["took_s"]:
                busiest, added = name, moved
        if not busiest:
            return ""
        now = self._before[busiest]
        weight = sum(now.get("worker_pss", {}).values())
        memory = f", {terminal.human_bytes(weight)}" if weight else ""
        workers = now.get("settings", {}).get("num_workers", "?")
        rate, share = added["samples"] / added["took_s"], added["wait_s"] / added["took_s"]
        return f"stoker: {terminal.short(busiest)}: {rate:,.0f} samples/s, waits {share:.0%}, {workers} workers{memory}"

    def stop(self) -> None:
        """Ends the thread, and takes the line away."""
        self._stop.set()
        self._thread.join()
        self._clear()

    def _clear(self) -> None:
        from rich.control import Control
        from rich.segment import ControlType

        if self._live:
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
