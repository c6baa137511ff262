"""Loaders of subsets of one dataset share its cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from stoker.tuning import apply
from tests.tuning.conftest import put_behind_apply

SAMPLES = 32


class Drawn(Dataset[Any]):
    """Its first part is slow, its second one random."""

    broken: Sequence[int] = ()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        if i in self.broken:
            raise OSError(f"cannot identify image file {i}")
        return torch.from_numpy(np.roll(slow(i), random.randrange(1000)) * torch.rand(1).item())


class Whole(Drawn):
    """Nothing in it is random."""

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(slow(i))


def slow(i: int) -> Any:
    """Some tenths of a millisecond, which is long enough to be kept."""
    x = np.arange(2000, dtype=np.float64) + i
    for _ in range(30):
        x = np.log(np.exp(x / 5000)) * 5000
    return x


class Loader(DataLoader[Any]):
    """What ``--apply`` is put behind."""


@pytest.fixture(autouse=True)
def applied(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return put_behind_apply(Loader, monkeypatch)


def check_dataset(worker: int) -> None:
    """A worker is told that it has the dataset that its loader was given."""
    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is Subset
    inner: Any = info.dataset
    while type(inner) is Subset:
        inner = inner.dataset
    assert isinstance(inner, Drawn)


def epochs(cls: type[DataLoader[Any]], parts: Sequence[Any], count: int, **how: Any) -> list[Any]:
    """Batches of some epochs, in each of which the loader of each part is iterated."""
    random.seed(7)
    torch.manual_seed(7)
    loaders = [cls(part, batch_size=4, shuffle=True, **how) for part in parts]
    return [batch for _ in range(count) for loader in loaders for batch in loader]


def folds(data: Any) -> list[Any]:
    return [Subset(data, [i for i in range(SAMPLES) if i % 5 != k]) for k in range(3)]


def halves(data: Any) -> list[Any]:
    return [Subset(data, list(range(0, SAMPLES, 2))), Subset(data, range(1, SAMPLES, 2))]


def nested(data: Any) -> list[Any]:
    outer = Subset(data, np.arange(SAMPLES)[::-1].tolist())
    return [Subset(outer, torch.arange(24).tolist()), Subset(outer, [-1, -2, *range(22)])]


@pytest.mark.parametrize(
    ("data", "parts", "workers", "init"),
    [
        (Drawn, folds, 0, None),
        (Drawn, nested, 2, check_dataset),
        (Whole, halves, 2, None),
        (Whole, nested, 0, None),
    ],
)
@pytest.mark.slow
def test_they_have_one_cache(
    data: Any, parts: Callable[[Any], list[Any]], workers: int, init: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "first_guess", lambda loader: (workers, "as it has"))
    wanted = epochs(DataLoader, parts(data()), 3, num_workers=workers, worker_init_fn=init)
    found = epochs(Loader, parts(data()), 3, num_workers=workers, worker_init_fn=init)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    (known,) = apply._datasets
    assert known.staged is not None
    assert known.staged.usable
    assert known.staged.account.filled == len({int(i) % SAMPLES for part in parts(data()) for i in _of_whole(part)})


def _of_whole(part: Any) -> list[int]:
    return part.indices if type(part.dataset) is not Subset else [part.dataset.indices[i] for i in part.indices]


@pytest.mark.slow
def test_a_later_fold_makes_no_sample_anew() -> None:
    first, second, _ = folds(Whole())
    list(Loader(first, batch_size=4, num_workers=2))
    (known,) = apply._datasets
    assert known.staged is not None
    assert known.staged.account.filled == len(first.indices)
    list(Loader(second, batch_size=4, num_workers=2))
    assert known.staged.account.filled == len({*first.indices, *second.indices})
    assert apply._datasets == [known]


@pytest.mark.slow
def test_a_subset_that_leaves_out_what_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial looks at samples of the subset."""
    monkeypatch.setattr(Drawn, "broken", [i for i in range(SAMPLES) if i % 3])
    part = Subset(Drawn(), list(range(0, SAMPLES, 3)))
    epochs(Loader, [part], 2, num_workers=2)
    (known,) = apply._datasets
    assert known.staged is not None
    assert known.staged.account.filled == len(part)


def test_a_small_subset_of_what_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Huge(Whole):
        def __len__(self) -> int:
            return 1 << 30

    part = Subset(Huge(), list(range(SAMPLES)))
    assert len(epochs(Loader, [part], 2, num_workers=0)) == 2 * SAMPLES // 4
    (known,) = apply._datasets
    assert known.staged is not None, known.reason
    assert known.staged.account.filled == SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("anew", [False, True])
def test_a_dataset_that_is_changed_for_each_of_its_subsets(anew: bool, recwarn: pytest.WarningsRecorder) -> None:
    """As ``full.transform = ...`` before each epoch of training and of evaluation: each has its cache."""

    class Scaled(Whole):
        scale = 1.0

        def __getitem__(self, i: int) -> Any:
            return super().__getitem__(i) * self.scale

    def run(cls: type[DataLoader[Any]]) -> list[Any]:
        torch.manual_seed(1)
        data, out = Scaled(), []
        train, val = halves(data)
        for _ in range(3):
            if anew:
                train, val = halves(data)
            data.scale = 2.0
            out += list(cls(train, batch_size=4, shuffle=True, num_workers=2))
            data.scale = 3.0
            out += list(cls(val, batch_size=4, num_workers=2))
        return out

    assert all(torch.equal(a, b) for a, b in zip(run(Loader), run(DataLoader), strict=True))
    assert [known.staged and known.staged.account.filled for known in apply._datasets] == [SAMPLES // 2] * 2
    assert not [str(w.message) for w in recwarn if "discarded" in str(w.message)]
