"""``stoker run --tensorboard DIR``: the loaders' figures as scalars, once a second, by the number of batches."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from ...core.errors import UsageError

EVERY_S = 1.0


class Scalars:
    """A thread that writes.

    Args:
        folder: TensorBoard's; made if it is not there.
        look: all loaders as they are now, by name; see ``ticker.Ticker``.
    """

    def __init__(self, folder: Path, look: Callable[[], dict[str, dict[str, Any]]]) -> None:
        self._look = look
        self._before: dict[str, dict[str, Any]] = {}
        self._writer = _module().SummaryWriter(str(folder), filename_suffix=".stoker")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stoker_scalars", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._write()

    def _write(self) -> None:
        now = self._look()
        for name, m in now.items():
            old = self._before.get(name, {})
            wait, step, batches, samples = (m[k] - old.get(k, 0) for k in ("wait_s", "step_s", "batches", "samples"))
            took = wait + step
            if batches <= 0 or took <= 0:
                continue
            figures = {
                "samples_per_s": samples / took,
                "wait_share": wait / took,
                "num_workers": m.get("settings", {}).get("num_workers", 0),
                "workers_memory_bytes": sum(m.get("worker_pss", {}).values()),
            }
            for what, value in figures.items():
                self._writer.add_scalar(f"stoker/{name}/{what}", value, int(m["batches"]))
        self._before = now

    def stop(self) -> None:
        """Writes what is left, and ends."""
        self._stop.set()
        self._thread.join()
        self._write()
        self._writer.close()


def check(folder: Path) -> None:
    """Raises before anything is run where nothing could be written.

    Raises:
        UsageError: no such folder can be made, or tensorboard is not installed.
    """
    place = folder if folder.exists() else folder.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UsageError(f"--tensorboard {folder}: no folder can be made there")
    _module()


def _module() -> Any:
    try:
        return import_module("torch.utils.tensorboard")
    except ImportError:
        raise UsageError("--tensorboard needs tensorboard: pip install 'stoker[tensorboard]'") from None
