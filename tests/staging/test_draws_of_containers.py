"""Branches of samples whose container draws from a generator of its own before the cut, as albumentations' Compose does."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import Dataset

import stoker

pytestmark = [pytest.mark.timeout(60)]


class Gated:
    """Draws whether to do anything, though it always does."""

    def __init__(self, transforms: list[Callable[[torch.Tensor], torch.Tensor]]) -> None:
        self.transforms, self.rng = transforms, random.Random(5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.rng.random() < 1.5:
            for t in self.transforms:
                x = t(x)
        return x


class Slow:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(400):
            x = (x * 1.0001 + 1).sin()
        return x


class Flip:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1) if torch.rand(()) < 0.5 else x


class Pictures(Dataset):
    def __init__(self) -> None:
        self.tf = Gated([Slow(), Flip()])

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.full((64, 64), float(i))
        if i % 2:
            x = x + 1
        return self.tf(x)


@pytest.mark.slow
def test_a_draw_that_changes_no_cached_part_does_not_end_the_cache() -> None:
    staged = stoker.Staged(Pictures())
    for _ in range(2):
        list(stoker.DataLoader(staged, batch_size=4, num_workers=2, shuffle=True))
    assert staged.split is not None
    assert staged.split.plan is not None
    assert staged.split.plan.moves
    assert staged.account.filled == 40
