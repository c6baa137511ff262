"""How far each loader of a watched process came, in memory that ``stoker run`` holds too, so a SIGKILL leaves it."""

from __future__ import annotations

import mmap
import os
from typing import Any

LIVE = ("wait_s", "first_wait_s", "step_s", "batches", "samples", "epochs")
ROWS = 256  # loaders of one process


class Live:
    """A table with one row of doubles, ``LIVE``, for each loader.

    Args:
        fd: the memory of another process' table, to read; None makes a new one.
    """

    def __init__(self, fd: int | None = None) -> None:
        size = ROWS * len(LIVE) * 8
        if fd is None:
            self.fd = os.memfd_create("stoker-live", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, size)
            memory = mmap.mmap(self.fd, size)
        else:
            self.fd = fd
            memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        self._view = memoryview(memory).cast("d")
        self._beyond = memoryview(bytearray(len(LIVE) * 8)).cast("d")

    def row(self, index: int) -> Any:
        """The row of a process' loader number ``index``. Those beyond the table have one that nobody reads."""
        if index >= ROWS:
            return self._beyond
        return self._view[index * len(LIVE) : (index + 1) * len(LIVE)]
