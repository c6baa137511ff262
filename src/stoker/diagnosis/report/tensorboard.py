"""``stoker run --tensorboard DIR``: the loaders' figures as scalars, once a second, by the number of batches."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from .live import Every, Read


class Scalars(Every):
    """Writes the figures of each loader.

    Args:
        folder: TensorBoard's; made if it is not there.
        read: see ``live.Every``.
    """

    def __init__(self, folder: Path, read: Read) -> None:
        self._writer = _module().SummaryWriter(str(folder), filename_suffix=".stoker")
        super().__init__(read, "stoker_scalars")

    def tick(self) -> None:
        for name, now, added in self.moved():
            figures = {
                "samples_per_s": added["samples"] / added["took_s"],
                "wait_share": added["wait_s"] / added["took_s"],
                "num_workers": now.get("settings", {}).get("num_workers", 0),
                "workers_memory_bytes": sum(now.get("worker_pss", {}).values()),
            }
            for what, value in figures.items():
                self._writer.add_scalar(f"stoker/{name}/{what}", value, int(now["batches"]))

    def stop(self) -> None:
        """Writes what is left, and ends."""
        super().stop()
        self.tick()
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
