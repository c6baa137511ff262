"""``--apply`` keeps nothing made from an object that each worker makes on first use, if the script has changed what it
is made from."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from stoker.core.compare import equal_bits
from stoker.staging import change_watch
from stoker.tuning import apply
from tests.exact.cases import slow
from tests.tuning.test_apply import Loader, applied  # noqa: F401  # a fixture

EPOCHS = 6


class Helper:
    def __init__(self) -> None:
        self.made: Any = None
        self.width = 1.0


class OnAHelper(Dataset[Any]):
    def __init__(self) -> None:
        self.helper = Helper()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        if self.helper.made is None:
            self.helper.made = np.full(128, self.helper.width)
        return torch.from_numpy(slow(i, 128) * self.helper.made)


class OnItself(OnAHelper):
    made: Any = None

    def __getitem__(self, i: int) -> Any:
        if self.made is None:
            self.made = [self.helper.width] * 128
        return torch.from_numpy(slow(i, 128) * self.made[3])


class ByAProperty(OnAHelper):
    @functools.cached_property
    def made(self) -> Any:
        return np.full(128, self.helper.width)

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(slow(i, 128) * self.made)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::stoker.StokerWarning")
@pytest.mark.parametrize("cls", [OnAHelper, OnItself, ByAProperty])
def test_each_epoch_is_made_from_what_the_script_has_set(
    applied: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    cls: type[OnAHelper],
) -> None:
    monkeypatch.setattr(change_watch, "COMPARED", 0)
    data = cls()
    loader = Loader(data, batch_size=8, num_workers=2)
    kept = False
    for epoch in range(EPOCHS):
        data.helper.width = 1.0 + epoch
        expected = torch.stack([torch.from_numpy(slow(i, 128) * data.helper.width) for i in range(len(data))])
        assert equal_bits(torch.cat(list(loader)), expected), f"epoch {epoch}"
        kept |= any(known.staged is not None for known in apply._datasets)
    assert kept
