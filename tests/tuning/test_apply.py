"""What ``--apply`` decides of a loader, in the script's own process."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from stoker.tuning import apply


class Slow(Dataset[Any]):
    """A sample takes about a millisecond."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        x = np.arange(4000, dtype=np.float64) + i
        for _ in range(100):
            x = np.log(np.exp(x / 5000)) * 5000
        return torch.from_numpy(np.roll(x, random.randrange(9)))


def test_workers_are_decided_on_again_when_the_trial_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader without workers kept none for ever where the trial took longer than the script waits for it."""

    class Loader(DataLoader[Any]):
        pass

    for name, value in {"WAIT_S": 0, "_datasets": [], "_entries": [], "keep_freed_memory": lambda: None}.items():
        monkeypatch.setattr(apply, name, value)
    monkeypatch.setattr(apply, "first_guess", lambda loader: (2, "two cores"))
    applied: dict[str, Any] = {}
    apply.attach(SimpleNamespace(DataLoader=Loader), applied)
    loader = Loader(Slow(), batch_size=8)
    assert len(list(loader)) == 8
    assert applied["?"]["reason"] == "kept 0: the trial has not ended yet"
    known = apply._datasets[0]
    assert known.trial is not None
    assert known.trial.wait(60)
    for _ in range(2):
        assert len(list(loader)) == 8
        assert applied["?"]["from"]["num_workers"] == 0
        assert applied["?"]["to"]["num_workers"] == 2, applied
    assert len(apply._entries) == 1
