"""Data on a device is served from the process that owns it; the CPU stands in for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import stoker
from stoker.core.errors import StokerWarning
from stoker.loader import device_iterator
from stoker.loader.device_iterator import ResidentIter
from stoker.staging import device_tier

N = 50


class Source(Dataset[Any]):
    def __init__(self, ragged: bool = False) -> None:
        self.ragged = ragged

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.full((1 + i % 3 if self.ragged else 3, 4), float(i)), i


def stay(samples: list[Any]) -> list[Any]:
    return samples


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
    monkeypatch.setattr(device_tier, "accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(device_iterator, "is_on_device", lambda _: True)


@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
@pytest.mark.parametrize("subset", [False, True], ids=["all", "subset"])
@pytest.mark.few(2)
def test_a_full_cache_moves_to_the_device_and_no_batch_changes(
    standing_in: None, settings: dict[str, Any], subset: bool
) -> None:
    def made(data: Any) -> Any:
        return Subset(data, range(N - 1, -1, -1)) if subset else data

    want, _ = epochs(made(Source()), **settings)
    staged = stoker.Staged(Source(), cache="device")
    got, kinds = epochs(made(staged), **settings)
    assert [k is ResidentIter for k in kinds] == [False, True, True, True]
    assert all(map(same, want, got))
    assert "batches are made on cpu" in staged.report


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


def test_a_device_that_is_too_small_is_said(standing_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tier, "free_bytes", lambda _: 100)
    staged = stoker.Staged(Source(), cache="device")
    with pytest.warns(StokerWarning, match="half of what is free on cpu is 50") as said:
        _, kinds = epochs(staged)
    assert len(said) == 1
    assert ResidentIter not in kinds


class Turned(Source):
    def __getitem__(self, i: int) -> Any:
        return torch.arange(12, dtype=torch.float32).view(4, 3).t() + i, i


def test_strided_samples_keep_their_strides(standing_in: None) -> None:
    want, _ = epochs(Turned())
    got, kinds = epochs(stoker.Staged(Turned(), cache="device"), num_workers=2)
    assert kinds[-1] is ResidentIter
    assert all(map(same, want, got))


def test_ragged_samples_stay_in_memory(standing_in: None) -> None:
    staged = stoker.Staged(Source(ragged=True), cache="device")
    loader = stoker.DataLoader(staged, num_workers=1)  # of one sample
    list(loader)
    with pytest.warns(StokerWarning, match="not all of one shape"):
        kinds = [type(iter(loader))]
    assert ResidentIter not in kinds


def test_a_collate_of_ones_own_stays_with_the_workers(standing_in: None) -> None:
    with pytest.warns(StokerWarning, match="collate_fn is not") as said:
        _, kinds = epochs(stoker.Staged(Source(), cache="device"), collate_fn=stay)
    assert sum(issubclass(warning.category, StokerWarning) for warning in said) == 1
    assert ResidentIter not in kinds


def test_what_is_augmented_as_a_batch_is_augmented_there(standing_in: None) -> None:
    staged = stoker.Staged(Source(), prepare=tuple, augment_batch=lambda b: (b[0] + 1, b[1]), cache="device")
    got, kinds = epochs(staged, num_workers=1)
    assert kinds[-1] is ResidentIter
    assert all(torch.equal(x[:, 0, 0], y + 1.0) for x, y in got)


def test_without_an_accelerator_it_is_said_and_kept_in_memory() -> None:
    if device_tier.accelerator() is not None:
        pytest.skip("there is one")
    with pytest.warns(StokerWarning, match="there is no accelerator"):
        staged = stoker.Staged(Source(), cache="device")
    _, kinds = epochs(staged)
    assert ResidentIter not in kinds
    assert staged.account.filled == N


def test_a_dataset_that_changes_is_not_served_from_the_device(standing_in: None) -> None:
    source = Source()
    staged = stoker.Staged(source, cache="device")
    loader = stoker.DataLoader(staged, batch_size=10, num_workers=1)
    for _ in range(2):
        list(loader)
    source.ragged = 0  # type: ignore[assignment]
    with pytest.warns(StokerWarning, match="discarded"):
        it = iter(loader)
    assert not isinstance(it, ResidentIter)
    assert len(list(it)) == N // 10
    assert isinstance(iter(loader), ResidentIter)


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
    with pytest.warns(StokerWarning, match="worker_init_fn, timeout. The reason: batches are made in this process"):
        list(loader)
