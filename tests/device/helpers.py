"""A device that copies late and runs out of memory, for tests without a device."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import torch

from stoker.device.prefetch import OutOfMemory


class LateCopies:
    """Copies when it is told to, at the latest when the consumer is to use the batch. Holds ``room`` batches."""

    def __init__(self, room: int = 1 << 30, seed: int = 0) -> None:
        self.room, self.rng = room, random.Random(seed)
        self.asked: deque[Any] = deque()
        self.most = self.spared = 0
        self.held = 0

    def send(self, batch: Any) -> tuple[Any, Any]:
        if self.held >= self.room:
            raise OutOfMemory("injected: out of memory")
        self.held += 1
        self.most = max(self.most, self.held)
        moved = torch.full_like(batch, -1)
        self.asked.append((moved, batch))
        if self.rng.random() < 0.3:
            self.finish(self.rng.randrange(1, len(self.asked) + 1))
        return moved, len(self.asked)

    def finish(self, n: int) -> None:
        for _ in range(min(n, len(self.asked))):
            moved, batch = self.asked.popleft()
            moved.copy_(batch)

    def arrive(self, batch: Any, event: Any) -> None:
        while any(moved is batch for moved, _ in self.asked):
            self.finish(1)
        self.held -= 1

    def spare(self) -> None:
        self.spared += 1
        self.held = 0
