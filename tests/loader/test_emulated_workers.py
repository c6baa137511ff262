"""An epoch without worker processes: the batches, random numbers, errors and order are those of torch's workers."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate, get_worker_info

import stoker
from stoker.core.options import AutoWorkers
from stoker.loader.emulated_workers import EmulatedWorkersIter, SeededTasksIter, worker_copies
from stoker.loader.loader_state import state_of
from stoker.workers.native_threads import OneThread, look
from tests.contract.trace import canon

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch's workers are forked here")


class Draws(Dataset[Any]):
    """Draws from the three process-wide generators, in ways that leave half of a pair of normal numbers waiting."""

    def __init__(self, n: int = 41, bad: int = -1) -> None:
        self.n, self.bad = n, bad

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        if i == self.bad:
            raise ValueError(f"sample {i} is broken")
        info = get_worker_info()
        drawn = random.gauss(0, 1), np.random.randn(), torch.randn(())
        return {"x": torch.full((3,), float(i)), "drawn": drawn, "worker": (info.id, info.num_workers, info.seed)}


class OwnGenerators(Draws):
    """Draws from generators of its own, of which each forked worker has a copy."""

    def __init__(self, n: int = 41) -> None:
        super().__init__(n)
        self.rng = np.random.default_rng(5)
        self.flip = {"flip": random.Random(6)}

    def __getitem__(self, i: int) -> Any:
        return {**super().__getitem__(i), "own": (self.rng.random(), self.flip["flip"].random())}


class Uncopied(dict[str, Any]):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not to be copied")


class Here(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return EmulatedWorkersIter(self, worker_copies(self))


class DrawingSampler(Sampler[int]):
    """Draws from the script's generator for each index, so it matters how far ahead it is read."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.n):
            yield int(torch.randint(self.n, ()))


def collate(samples: list[Any]) -> Any:
    info = get_worker_info()
    assert info is not None
    return default_collate([s["x"] for s in samples]), [s["drawn"] for s in samples], info.id, random.random()


def epochs(cls: type[DataLoader[Any]], dataset: Any, **settings: Any) -> list[Any]:
    """Three epochs, the second one left early, with draws of the script's own between the batches."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    out: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than cores
        loader = cls(dataset, **settings)
        for epoch in range(3):
            for k, batch in enumerate(loader):
                out.append((canon(batch), random.random(), np.random.randn(), float(torch.rand(()))))
                if epoch == 1 and k == 2:
                    break
    return out


def seed_all(worker: int) -> None:
    """As PyTorch's notes on reproducibility have it."""
    seed = torch.initial_seed() % 2**32 + 100 * worker
    np.random.seed(seed)
    random.seed(seed)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": 1, "batch_size": 4},
        {"num_workers": 2, "batch_size": 4, "shuffle": True},
        {"num_workers": 3, "batch_size": 4, "shuffle": True, "drop_last": True, "collate_fn": collate},
        {"num_workers": 2, "batch_size": None, "prefetch_factor": 3},
        {"num_workers": 2, "batch_size": 4, "worker_init_fn": seed_all},
        {"num_workers": 2, "batch_size": 5, "prefetch_factor": 1, "sampler": DrawingSampler(23)},
    ],
)
@pytest.mark.parametrize("make", [Draws, OwnGenerators])
def test_the_same_as_with_workers(make: type[Draws], settings: dict[str, Any]) -> None:
    ours, theirs = epochs(Here, make(), **settings), epochs(DataLoader, make(), **settings)
    assert len(ours) > 10
    assert ours == theirs


class Photos(OwnGenerators):
    """A deterministic part, and a random one."""

    def __getitem__(self, i: int) -> Any:
        x = torch.full((64, 64), float(i)).exp().log()
        return x * self.rng.random() + random.random(), self.flip["flip"].random()


@pytest.mark.slow
def test_the_same_from_a_cache() -> None:
    settings = {"num_workers": 2, "batch_size": 4, "shuffle": True}
    staged = stoker.Staged(Photos())
    for _ in stoker.DataLoader(staged, **settings):
        pass
    assert staged.account.filled == len(staged)
    assert epochs(Here, staged, **settings) == epochs(DataLoader, Photos(), **settings)


class Opens(Photos):
    """Opens a file when it is first needed."""

    file: Any = None

    def __getitem__(self, i: int) -> Any:
        if self.file is None:
            self.file = open(__file__, "rb")
        return super().__getitem__(i)


@pytest.mark.slow
def test_a_file_that_samples_open_is_each_worker_s_own() -> None:
    dataset = Opens()
    staged = stoker.Staged(Subset(dataset, range(41)))
    loader = DataLoader(staged, batch_size=4, num_workers=2)
    own = worker_copies(loader, alone=True)
    assert len(list(EmulatedWorkersIter(loader, own))) == 11
    files = [copied.dataset.dataset.file for copied, _ in own]
    assert dataset.file is None
    assert len({id(file) for file in files}) == 2
    for file in files:
        file.close()


def test_what_cannot_be_copied_draws_nothing() -> None:
    dataset = OwnGenerators()
    dataset.flip = Uncopied(dataset.flip)
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match="not to be copied"):
        iter(Here(dataset, batch_size=4, num_workers=2))
    assert torch.equal(before, torch.get_rng_state())


def test_the_script_s_generators_are_left_alone() -> None:
    loader = iter(Here(Draws(), batch_size=4, num_workers=2))
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    for _ in range(3):
        next(loader)
    after = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    assert get_worker_info() is None


def test_a_sample_that_fails_ends_its_batch_alone() -> None:
    loader = iter(Here(Draws(bad=6), batch_size=4, num_workers=2))
    torchs = iter(DataLoader(Draws(bad=6), batch_size=4, num_workers=2))
    for it in (loader, torchs):
        next(it)
        with pytest.raises(ValueError, match=r"Caught ValueError in DataLoader worker process 1"):
            next(it)
    assert [len(batch["x"]) for batch in loader] == [len(batch["x"]) for batch in torchs]


def test_a_batch_is_not_in_shared_memory() -> None:
    """torch's collate function takes shared memory in what it thinks to be a worker."""
    assert not next(iter(Here(Draws(), batch_size=4, num_workers=2)))["x"].is_shared()
    assert not next(iter(Here(Draws(), batch_size=4, num_workers=2, collate_fn=collate)))[0].is_shared()


class Product(Dataset[Any]):
    """A sum and a product whose last bits depend on the number of threads."""

    def __init__(self) -> None:
        self.basis = np.random.RandomState(0).randn(64, 513).astype("f4")

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Any:
        x = np.random.RandomState(i).randn(513, 301).astype("f4")
        return (
            torch.from_numpy(self.basis @ x),
            torch.from_numpy(x).repeat(4, 1).sum(),
            torch.from_numpy(x) @ torch.ones(301),
        )


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [2, AutoWorkers(2)])
@pytest.mark.parametrize("of_script", [False, True])
def test_sums_and_products_have_the_bits_of_a_worker(of_script: bool, workers: Any) -> None:
    """A worker has one thread, and this process as many as there are cores."""
    loader = stoker.DataLoader(Product(), batch_size=2, num_workers=workers)
    cls = SeededTasksIter if isinstance(workers, AutoWorkers) else lambda x: EmulatedWorkersIter(x, worker_copies(x))
    of_workers = [canon(batch) for batch in loader]
    pools = look().lib_controllers
    before = [pool.get_num_threads() for pool in pools]
    try:
        for pool in pools:
            pool.set_num_threads(2)
        if of_script:
            torch.set_num_threads(2)  # MKL obeys this count from now on, and OpenMP's no more
        assert [canon(batch) for batch in cls(loader)] == of_workers
        assert {pool.get_num_threads() for pool in pools} == {2}
    finally:
        for pool, count in zip(pools, before, strict=True):
            pool.set_num_threads(count)


def test_one_thread_is_one_thread_and_then_as_before() -> None:
    before = torch.get_num_threads()
    cap = OneThread()
    with cap:
        assert torch.get_num_threads() == 1
        with cap.lifted():
            assert torch.get_num_threads() == before
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


class HereSeeded(DataLoader[Any]):
    """With random state set for each task, as ``--apply`` does where it changes the number of workers."""

    def _get_iterator(self) -> Any:
        self.num_workers = AutoWorkers(2)
        return SeededTasksIter(self)


class Simple(OwnGenerators):
    def __getitem__(self, i: int) -> Any:
        drawn = random.gauss(0, 1), np.random.randn(), torch.randn(())
        return i, drawn, self.rng.random(), self.flip["flip"].random()


class Seeded(stoker.DataLoader[Any]):
    def __init__(self, dataset: Any, **settings: Any) -> None:
        super().__init__(dataset, task_seeds=True, **settings)


def test_the_same_with_task_seeds() -> None:
    settings: dict[str, Any] = {"num_workers": 2, "batch_size": 4, "shuffle": True}
    assert epochs(HereSeeded, Simple(), **settings) == epochs(Seeded, Simple(), **settings)


@pytest.mark.few(1)
@pytest.mark.parametrize("cls", [Here, HereSeeded])
def test_two_loaders_in_step_draw_their_orders_as_with_workers(cls: type[DataLoader[Any]]) -> None:
    def orders(cls: type[DataLoader[Any]]) -> list[Any]:
        torch.manual_seed(7)
        one, two = (cls(list(range(20)), batch_size=3, shuffle=True, num_workers=2) for _ in range(2))
        return [(a.tolist(), b.tolist()) for a, b in zip(one, two, strict=True)]

    assert orders(cls) == orders(DataLoader)


class Pictures(Dataset[Any]):
    """Samples of 64 kB, so that batches are large enough for a slot."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        return torch.full((4, 64, 64), float(i)), i


def pairs(samples: list[Any]) -> Any:
    return default_collate([x for x, _ in samples]), [i for _, i in samples]


@pytest.mark.few(1)
@pytest.mark.parametrize("collate_fn", [None, pairs])
def test_memory_of_a_batch_is_used_again_only_when_nothing_refers_to_it(collate_fn: Any) -> None:
    loader = Here(Pictures(), batch_size=4, num_workers=2, collate_fn=collate_fn)
    for _ in range(3):  # the memory is passed on from one iterator to the next
        one, two = iter(loader), iter(loader)
        kept, parts = [], []
        for (x, i), (y, _) in zip(one, two, strict=True):
            assert x.data_ptr() != y.data_ptr()
            kept.append((x, list(map(int, i))))
            parts.append((y[1:2, 0].numpy(), int(i[1])))
            x += 1
        del one, two, x, y
        assert all((row == i + 1).all() for x, rows in kept for row, i in zip(x, rows, strict=True))
        assert all((part == i).all() for part, i in parts)
    assert len(state_of(loader).heaps) == 2
    del kept, parts
    places = {x.untyped_storage().data_ptr() for x, _ in loader}
    assert len(places) <= 3 or collate_fn is pairs  # one is looked at while the next is made; others may be in no slot


class OpenedOnce(OwnGenerators):
    """A library of which each process may open a file once: a worker does, and this process has done so already."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.process = after, os.getpid()

    def __getitem__(self, i: int) -> Any:
        if i >= self.after and os.getpid() == self.process:
            raise RuntimeError("already open in this process")
        return super().__getitem__(i)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("after", "settings"),
    [(0, {}), (17, {"shuffle": True, "drop_last": True}), (40, {"sampler": DrawingSampler(41), "collate_fn": collate})],
)
def test_after_an_error_workers_make_the_rest(after: int, settings: dict[str, Any]) -> None:
    settings = {"num_workers": 2, "batch_size": 4, **settings}
    assert epochs(Here, OpenedOnce(after), **settings) == epochs(DataLoader, OwnGenerators(), **settings)


@pytest.mark.slow
def test_after_an_error_workers_make_the_rest_with_task_seeds() -> None:
    settings: dict[str, Any] = {"num_workers": 2, "batch_size": 4, "shuffle": True}

    class Once(OpenedOnce, Simple):
        pass

    assert epochs(HereSeeded, Once(9), **settings) == epochs(Seeded, Simple(), **settings)


def test_an_error_that_no_worker_had_is_told() -> None:
    told: list[str] = []
    for dataset in (OpenedOnce(9), Draws(bad=6)):
        it = iter(Here(dataset, batch_size=4, num_workers=2))
        it.failed_here = told.append
        with contextlib.suppress(ValueError):
            list(it)
    assert len(told) == 1
    assert "already open in this process" in told[0]
