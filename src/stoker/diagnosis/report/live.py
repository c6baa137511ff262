"""``stoker run --live``: one line about the loaders while the script runs."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from ...core import terminal
from ...core.types import JsonObject

EVERY_S = 1.0
SELDOM = 10  # ticks between two lines where there is no terminal
Read = Callable[[], dict[str, JsonObject]]  # the metrics of all loaders, by name


class Every(ABC):
    """A thread that calls ``tick`` once a second.

    Args:
        read: returns all loaders as they are now, by name: fields of ``LoaderMetrics``, sums since the beginning.
        name: of the thread.
    """

    def __init__(self, read: Read, name: str) -> None:
        self._read = read
        self._before: dict[str, JsonObject] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.tick()

    @abstractmethod
    def tick(self) -> None:
        """Called once in ``EVERY_S``."""

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def moved(self) -> Iterator[tuple[str, JsonObject, dict[str, float]]]:
        """Loaders that delivered since the last call: name, fields as they are now, and what was added to the sums."""
        before, self._before = self._before, self._read()
        for name, now in self._before.items():
            old = before.get(name, {})
            added = {key: now[key] - old.get(key, 0) for key in ("wait_s", "step_s", "batches", "samples")}
            added["took_s"] = added["wait_s"] + added["step_s"]
            if added["batches"] > 0 and added["took_s"] > 0:
                yield name, now, added


class Ticker(Every):
    """Says how the busiest loader is doing.

    Args:
        read: see ``Every``.
    """

    def __init__(self, read: Read) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._live = sys.stderr.isatty() and not self._console.is_dumb_terminal
        self._ticks = 0
        super().__init__(read, "stoker_live")

    def tick(self) -> None:
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
        moved = max(self.moved(), key=lambda loader: loader[2]["took_s"], default=None)
        if moved is None:
            return ""
        name, now, added = moved
        weight = sum(now.get("worker_pss", {}).values())
        memory = f", {terminal.human_bytes(weight)}" if weight else ""
        workers = now.get("settings", {}).get("num_workers", "?")
        rate, share = added["samples"] / added["took_s"], added["wait_s"] / added["took_s"]
        return f"stoker: {terminal.short(name)}: {rate:,.0f} samples/s, waits {share:.0%}, {workers} workers{memory}"

    def stop(self) -> None:
        """Takes the line away."""
        super().stop()
        self._clear()

    def _clear(self) -> None:
        from rich.control import Control
        from rich.segment import ControlType

        if self._live:
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
