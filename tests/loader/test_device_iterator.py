"""Data on a device is served from the process that owns it; the CPU stands in for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import stoker
from stoker.core.errors import StokerWarning
from stoker.loader import device_iterator
from stoker.loader.device_iterator import ResidentIter

N = 50


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def epochs(dataset: Any, n: int = 4, **settings: Any) -> tuple[list[Any], list[type]]:
    torch.manual_seed(5)
    loader = stoker.DataLoader(dataset, batch_size=8, shuffle=True, **settings)
    batches, kinds = [], []
    for _ in range(n):
        it = iter(loader)
        kinds.append(type(it))
        batches += list(it)
    return batches, kinds


SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": "auto"},
]
NAMES = ["inline", "workers", "persistent", "auto"]


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_iterator, "is_on_device", lambda _: True)


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", SETTINGS[1:], ids=NAMES[1:])
def test_tensors_on_a_device_are_gathered_there(standing_in: None, settings: dict[str, Any]) -> None:
    data = TensorDataset(torch.arange(N * 3).view(N, 3), torch.arange(N))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_iterator, "is_on_device", lambda _: False)
        want, kinds = epochs(data, **settings)
    assert ResidentIter not in kinds
    got, kinds = epochs(data, pin_memory=True, **settings)
    assert set(kinds) == {ResidentIter}
    assert all(map(same, want, got))


class Touches(Dataset[Any]):
    """What torch says to a forked worker that touches CUDA."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")


def test_a_worker_that_touches_the_device_is_told_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"re-initialize[\s\S]*move them \(device=\"cuda\"\)[\s\S]*TensorDataset"):
        next(iter(stoker.DataLoader(Touches(), num_workers=1)))


def test_settings_of_workers_are_said_to_have_no_effect(standing_in: None) -> None:
    loader = stoker.DataLoader(TensorDataset(torch.arange(9)), num_workers=2, worker_init_fn=print, timeout=5)
    with pytest.warns(StokerWarning, match="worker_init_fn, timeout. Reason: batches are made in this process"):
        list(loader)
