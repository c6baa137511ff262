"""torchdata's ``StatefulDataLoader`` makes its iterators itself, and has the cache of ``--apply``."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from stoker.tuning import apply, cache_pays, managed_dataset

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.scripts
N = 23


class Files(Dataset[Any]):
    """Each sample is made of a file, which takes some time."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / f"{i}.txt" for i in range(N)]

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        text = self.paths[i].read_text()
        out = torch.zeros(4)
        for k in range(4000):
            out[k % 4] += 1 if k % len(text) else 2
        return out


@pytest.mark.parametrize("change", ["nothing", "a file"])
def test_workers_that_stay_are_served_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    for name, value in {"_datasets": [], "_entries": {}, "LONG_WAIT_S": 60.0, "_with_gradients": set()}.items():
        monkeypatch.setattr(apply, name, value)
    for name in ("WAIT_SHARE", "MUCH_S"):  # epochs take little time here
        monkeypatch.setattr(managed_dataset, name, math.inf)
    monkeypatch.setattr(cache_pays, "LITTLE_S", math.inf)
    data = Files(tmp_path)
    for i, path in enumerate(data.paths):
        path.write_text("x" * (i + 3))
    loader = torchdata.StatefulDataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)
    batches = []
    for epoch in range(4):
        if change == "a file" and epoch == 2:
            data.paths[5].write_text("yyy")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with apply.cache_alone({}, loader):
                it = iter(loader)
        batches.append(torch.cat(list(it)))
        if epoch == 0:
            first = apply._datasets[0].staged
            assert first is not None
            store = first._store
            assert store is not None
        assert torch.equal(batches[-1], torch.stack([data[i] for i in range(N)]))
        assert store.usable == (change == "nothing" or epoch < 2)
        assert epoch != 1 or first.account.filled == N
    del it, loader


def test_workers_that_ran_before_the_trial_ended_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"_datasets": [], "_entries": {}, "_with_gradients": set()}.items():
        monkeypatch.setattr(apply, name, value)
    for name in ("WAIT_SHARE", "MUCH_S"):  # epochs take little time here
        monkeypatch.setattr(managed_dataset, name, math.inf)
    monkeypatch.setattr(cache_pays, "LITTLE_S", math.inf)
    data = Files(tmp_path)
    for path in data.paths:
        path.write_text("xxx")
    loader = torchdata.StatefulDataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)
    list(loader)
    with apply.cache_alone({}, loader):
        list(loader)
    assert not apply._datasets
