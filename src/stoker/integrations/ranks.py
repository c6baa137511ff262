"""Collects a few numbers from all ranks of a distributed training."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT_S = 300.0  # a rank may write a checkpoint while the others wait here; torch's own groups wait half an hour


def world() -> int:
    """How many ranks there are; 1 where torch.distributed is not used."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    return world() == 1 or dist.get_rank() == 0


class RankGather:
    """All ranks call it at the same place of their loops, and each gets the rows of all. The rows go through a group of
    their own on gloo: they are on the CPU, so nothing waits for the device. A rank that does not come ends it for good,
    after ``timeout_s``; then each rank has its own row only."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.failure = ""  # why it has ended; "" while it works
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None
        self._made_in: object = None  # torch's default group then; a script may end it and begin another

    def __call__(self, row: Sequence[float]) -> list[list[float]]:
        """The row of each rank, by rank; this rank's own only where there is one rank, or after a failure."""
        if self.failure or world() == 1:
            return [list(row)]
        try:
            if self._group is None or self._made_in is not dist.group.WORLD:
                self._group = dist.new_group(backend="gloo", timeout=self._timeout)
                self._made_in = dist.group.WORLD
            out = [torch.empty(len(row), dtype=torch.float64) for _ in range(world())]
            dist.all_gather(out, torch.tensor(row, dtype=torch.float64), group=self._group)
        except Exception as e:  # torch has several kinds
            self.failure = str(e).strip().partition("\n")[0] or type(e).__name__
            return [list(row)]
        return [x.tolist() for x in out]
