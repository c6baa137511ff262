"""Whether a script's dataset could be kept in memory: tried in a child process beside the script, once a loader.

The child is a grandchild, so that a script which waits for its own children never meets it. It runs at a lower
priority than the script and for seconds; what it finds comes through a pipe, and is asked for when the script ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from typing import Any

NICE = 5  # a quarter of a core beside busy workers; at 19 it would never be done
LIMIT_S = 30
PATIENCE_S = 0.5  # for a child that is not done when the script ends
STARVED = 0.1  # part of the loop, as the doctor has it


class Tries:
    """What was tried for each loader."""

    def __init__(self) -> None:
        self._pipes: dict[str, int] = {}

    def begin(self, loader: Any, metrics: Any) -> None:
        """A loader begins an epoch. If it was starved so far, its dataset is tried, in the second one."""
        total = metrics.wait_s + metrics.step_s
        again = metrics.epochs >= 1 and metrics.name not in self._pipes
        if not again or not total or metrics.wait_s / total < STARVED or sys.platform != "linux":
            return
        if loader._dataset_kind != 0 or hasattr(type(loader.dataset), "_stoker_batches"):
            return
        reader, writer = os.pipe2(os.O_CLOEXEC)
        self._pipes[metrics.name] = reader
        child = os.fork()
        if child == 0:
            try:
                if os.fork() == 0:
                    _try(loader.dataset, writer)
            finally:
                os._exit(0)
        os.close(writer)
        with contextlib.suppress(ChildProcessError):  # the script lets the kernel reap its children
            os.waitpid(child, 0)

    def collect(self, loaders: dict[str, Any]) -> None:
        """Notes what was found, at the script's end."""
        for name, reader in self._pipes.items():
            ready, _, _ = select.select([reader], [], [], PATIENCE_S)
            text = os.read(reader, 1 << 16) if ready else b""
            os.close(reader)
            if text and name in loaders:
                loaders[name].cacheable = json.loads(text)
        self._pipes.clear()

    def forked(self) -> None:
        """In a child: these are its parent's."""
        for reader in self._pipes.values():
            os.close(reader)
        self._pipes.clear()


def _try(dataset: Any, writer: int) -> None:
    """The life of the grandchild."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        os.nice(NICE)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        try:
            import torch

            from .staging.worth import worth

            torch.set_num_threads(1)  # OpenMP's own threads have stayed in the parent
            found = worth(dataset)
            out = {**found._asdict(), "share": found.share, "saved_s": found.saved_s, "fill_s": found.fill_s}
        except Exception as e:
            out = {"why": f"{type(e).__name__}: {e}"[:2000]}
        os.write(writer, json.dumps(out).encode()[: 1 << 16])
    finally:
        os._exit(0)
