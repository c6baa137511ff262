"""Gathers a few numbers from all ranks of a distributed training."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT_S = 300.0  # long enough for a rank that writes a checkpoint; torch's own groups wait half an hour


def world() -> int:
    """Returns the number of ranks; 1 if torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    return world() == 1 or dist.get_rank() == 0


class RankGather:
    """Gathers a row of numbers from every rank. All ranks must call it at the same place in their loops.

    The rows are CPU tensors in a separate gloo group, so gathering never waits for the device. If a rank does not call
    within ``timeout_s``, gathering ends for good: from then on each rank gets only its own row."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.failure = ""  # why gathering ended; "" while it works
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None
        self._made_in: object = None  # the default group when ``_group`` was made: a script may replace its own

    def __call__(self, row: Sequence[float]) -> list[list[float]]:
        """Returns the rows of all ranks, in rank order; only this rank's row after a failure or with a single rank."""
        if self.failure or world() == 1:
            return [list(row)]
        try:
            if self._group is None or self._made_in is not dist.group.WORLD:
                self._group = dist.new_group(backend="gloo", timeout=self._timeout)
                self._made_in = dist.group.WORLD
            out = [torch.empty(len(row), dtype=torch.float64) for _ in range(world())]
            dist.all_gather(out, torch.tensor(row, dtype=torch.float64), group=self._group)
        except Exception as e:  # torch raises several types
            self.failure = str(e).strip().partition("\n")[0] or type(e).__name__
            return [list(row)]
        return [x.tolist() for x in out]
