"""Task seeds reach generators that objects hold: the same bits from any number of workers, of any kind."""

from __future__ import annotations

import functools
import random
import re
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, default_collate, get_worker_info

import stoker
from stoker.core.errors import StokerWarning

N, BATCH = 24, 4
OTHERS: list[dict[str, Any]] = [
    {"num_workers": 1},
    {"num_workers": 3},
    {"num_workers": 2, "multiprocessing_context": "spawn"},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "on_error": "skip"},
    {"num_workers": 0, "on_error": "skip"},
    {"num_workers": 0, "debug": True},
]
THREADS: list[dict[str, Any]] = [
    {"num_workers": 1, "worker_method": "thread"},
    {"num_workers": 3, "worker_method": "thread"},
    {"num_workers": 2, "worker_method": "thread", "persistent_workers": True},
]


class Flip:
    """As MONAI's transforms: a generator for each, and what was drawn is kept on the transform meanwhile."""

    def __init__(self, seed: int | None = None) -> None:
        self.R = np.random.RandomState(seed)

    def randomize(self) -> None:
        self.amount = float(self.R.random())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.randomize()
        return torch.cat([x, torch.tensor([self.amount], dtype=torch.float64)])


class Shared:
    """As albumentations': what a container draws from, its transforms draw from."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)
        self.random_generator, self.py_random = np.random.default_rng(137), random.Random(137)
        for t in self.transforms:
            t.random_generator, t.py_random = self.random_generator, self.py_random

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for t in self.transforms:
            x = t(x)
        return torch.cat([x, torch.tensor([self.py_random.random()], dtype=torch.float64)])


class Noise:
    random_generator: Any
    py_random: Any

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.tensor([self.random_generator.random(), self.py_random.gauss(0, 1)])])


class Own(Dataset):
    """A generator of each kind, in attributes, containers and transforms."""

    def __init__(self) -> None:
        self.rng, self.rngs = np.random.default_rng(), {"torch": torch.Generator()}
        self.transform = [Flip(), Flip(5), Shared(Noise(), Noise())]

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.tensor(
            [i, self.rng.normal(), float(torch.rand((), generator=self.rngs["torch"]))], dtype=torch.float64
        )
        for t in self.transform:
            x = t(x)
        return x


class Lazy(Dataset):
    """Makes its generator when it is first needed, in whichever process that is."""

    def __init__(self) -> None:
        self.rng: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.rng is None:
            info = get_worker_info()
            self.rng = np.random.default_rng(None if info is None else info.seed)
        return torch.tensor([i, self.rng.random()])


class Reseeds(Dataset):
    """As later albumentations: seeds itself by torch's worker seed, in workers alone, when first called in one."""

    def __init__(self) -> None:
        self.rng, self.seen = random.Random(1), 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        info = get_worker_info()
        if info is not None and info.seed != self.seen:
            self.rng, self.seen = random.Random(torch.initial_seed()), info.seed
        return torch.tensor([i, self.rng.random()])


class ByTorch(Reseeds):
    """The same whenever torch's seed is another one, unless its state was set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self._manual_random_state = False

    def __getitem__(self, i: int) -> torch.Tensor:
        if get_worker_info() is not None and not self._manual_random_state and self.seen != torch.initial_seed():
            self.rng, self.seen = random.Random(torch.initial_seed()), torch.initial_seed()
        return torch.tensor([i, self.rng.random()])


class PerWorker(Dataset):
    def __init__(self) -> None:
        self.rngs: dict[int, random.Random] = {}

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        info = get_worker_info()
        rng = self.rngs.setdefault(0 if info is None else 0 * info.id, random.Random())
        return torch.tensor([i, rng.random()])


module_rng = np.random.default_rng(1)


class Global(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i, module_rng.random()])


class InCollate(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> float:
        return float(i)


class MixUp:
    def __init__(self) -> None:
        self.rng = np.random.RandomState()

    def __call__(self, samples: list[float]) -> torch.Tensor:
        return torch.as_tensor(samples)[torch.from_numpy(self.rng.permutation(len(samples)))]


def epochs(dataset: Any, **kw: Any) -> list[list[Any]]:
    """Two epochs, as lists."""
    torch.manual_seed(7)
    loader = stoker.DataLoader(dataset, batch_size=BATCH, shuffle=True, task_seeds=True, **kw)
    return [[batch.tolist() for batch in loader] for _ in range(2)]


def make(kind: str) -> tuple[Any, dict[str, Any]]:
    if kind == "collate_fn":
        return InCollate(), {"collate_fn": MixUp()}
    return {
        "objects": Own,
        "lazy": Lazy,
        "reseeds": Reseeds,
        "by torch": ByTorch,
        "per worker": PerWorker,
        "global": Global,
    }[kind](), {}


@pytest.mark.parametrize("kind", ["collate_fn", "objects", "lazy", "reseeds", "by torch", "per worker", "global"])
@pytest.mark.few(1)
def test_the_same_bits_from_any_number_of_workers(kind: str) -> None:
    dataset, kw = make(kind)
    expected = epochs(dataset, num_workers=0, **kw)
    assert expected[0] != expected[1]
    assert len({str(batch) for epoch in expected for batch in epoch}) == 2 * N // BATCH
    assert epochs(dataset, num_workers=0, **kw) == expected
    for other in OTHERS if kind == "objects" else OTHERS[:2]:
        dataset, kw = make(kind)
        found = epochs(dataset, **kw, **other)
        assert found[0] == expected[0], other
        if not other.get("persistent_workers"):  # torch draws no new base seed for these
            assert found == expected, other
        assert found[0] != found[1]


@pytest.mark.slow
def test_the_same_bits_from_persistent_workers_of_any_number() -> None:
    assert epochs(Own(), num_workers=1, persistent_workers=True) == epochs(
        Own(), num_workers=3, persistent_workers=True
    )


@pytest.mark.parametrize("kind", ["objects", "collate_fn"])
@pytest.mark.filterwarnings("error::stoker.core.errors.StokerWarning")
def test_the_same_bits_from_threads(kind: str) -> None:
    dataset, kw = make(kind)
    expected = epochs(dataset, num_workers=0, **kw)
    for other in THREADS:
        found = epochs(dataset, **kw, **other)
        assert found[0] == expected[0], other
        if not other.get("persistent_workers"):
            assert found == expected, other


@pytest.mark.parametrize("kind", ["lazy", "global"])
def test_what_threads_have_in_common_is_named(kind: str) -> None:
    place = "dataset.rng" if kind == "lazy" else f"{__name__}.module_rng"
    found: list[str] = []
    # What moved a generator while the consumer ran may have been the consumer: on a busy machine that may be all.
    for _ in range(10):
        loader = stoker.DataLoader(make(kind)[0], num_workers=2, worker_method="thread", task_seeds=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(loader)
        found += [str(w.message) for w in caught if issubclass(w.category, StokerWarning)]
        if found:
            break
    assert re.match(f'{place} is a single random generator.*worker_method="process"', found[0], re.DOTALL)


def test_threads_without_task_seeds_are_as_before_and_the_generator_is_named() -> None:
    dataset = Own()
    state = dataset.transform[0].R.get_state(legacy=False)
    with pytest.warns(StokerWarning, match="^dataset.* is a single random generator"):
        for _ in stoker.DataLoader(dataset, batch_size=BATCH, num_workers=2, worker_method="thread"):
            pass
    now = dataset.transform[0].R.get_state(legacy=False)
    assert state["state"]["pos"] != now["state"]["pos"]


def test_without_task_seeds_the_bits_are_torchs() -> None:
    kinds: list[Any] = [stoker.DataLoader, torch.utils.data.DataLoader]
    for workers in (0, 2):
        found = []
        for kind in kinds:
            torch.manual_seed(7)
            dataset = Reseeds()
            loader = kind(dataset, batch_size=BATCH, num_workers=workers)
            found.append([[batch.tolist() for batch in loader] for _ in range(2)])
        assert found[0] == found[1]


def test_auto_gives_the_same_bits() -> None:
    expected = epochs(Own(), num_workers=0)
    assert epochs(Own(), num_workers="auto") == expected
    torch.manual_seed(7)
    loader = stoker.DataLoader(Own(), batch_size=BATCH, shuffle=True, num_workers=2, task_seeds=True)
    assert [[batch.tolist() for batch in loader] for _ in range(2)] == expected


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.slow
def test_how_far_workers_were_ahead_when_an_epoch_is_left_shows_in_no_later_one(
    replacement: bool, persistent: bool
) -> None:
    def run(left_at: int, reseeded: bool, **kw: Any) -> list[Any]:
        order, generator = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        sampler = RandomSampler(range(90), replacement, generator=order)
        loader = stoker.DataLoader(range(90), batch_size=4, sampler=sampler, generator=generator, task_seeds=True, **kw)
        out: list[Any] = []
        for _ in range(3):
            out += [batch.tolist() for batch, _ in zip(loader, range(left_at), strict=False)]
            if reseeded:
                order.manual_seed(len(out))
        return [*out, order.get_state().tolist() if left_at > 23 else None]

    one, many = {"num_workers": 1}, {"num_workers": 3, "prefetch_factor": 5}
    for left_at, reseeded, kw in (
        (1, True, many),
        (9, False, many),
        (20, True, one),
        (22, False, one),
        (99, True, many),
    ):
        expected = run(left_at, reseeded, num_workers=0)
        assert run(left_at, reseeded, persistent_workers=persistent, **kw) == expected, (left_at, reseeded, kw)


def test_two_iterators_at_once_draw_different_orders() -> None:
    sampler = RandomSampler(range(90), generator=torch.Generator().manual_seed(1))
    loader = stoker.DataLoader(range(90), batch_size=4, sampler=sampler, task_seeds=True, num_workers=1)
    first, second = iter(loader), iter(loader)
    assert [x.tolist() for x in first] != [x.tolist() for x in second]


def test_the_scripts_own_generators_are_left_as_they_were() -> None:
    dataset = Own()
    before = [
        dataset.rng.bit_generator.state,
        dataset.rngs["torch"].get_state().tolist(),
        dataset.transform[1].R.get_state(legacy=True)[2],
        dataset.transform[2].py_random.getstate(),
    ]
    epochs(dataset, num_workers=0)
    epochs(dataset, num_workers=2, worker_method="thread")
    assert before == [
        dataset.rng.bit_generator.state,
        dataset.rngs["torch"].get_state().tolist(),
        dataset.transform[1].R.get_state(legacy=True)[2],
        dataset.transform[2].py_random.getstate(),
    ]


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_workers_has_the_same_bits() -> None:
    expected = epochs(Own(), num_workers=0)[0]
    for before, after in ((0, 2), (2, 0), (2, 3)):
        kw = {"batch_size": BATCH, "shuffle": True, "task_seeds": True}
        torch.manual_seed(7)
        first = stoker.DataLoader(Own(), num_workers=before, **kw)
        it = iter(first)
        found = [next(it).tolist() for _ in range(2)]
        state = first.state_dict()
        del it
        then = stoker.DataLoader(Own(), num_workers=after, **kw)
        then.load_state_dict(state)
        assert found + [batch.tolist() for batch in then] == expected


@pytest.mark.slow
def test_worker_init_fn_does_not_win() -> None:
    """As MONAI's, which gives each transform of a worker another generator."""
    expected = epochs(Own(), num_workers=0)
    for other in (1, 2):
        assert epochs(Own(), num_workers=other, worker_init_fn=exchange) == expected


def exchange(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    for t in dataset.transform[:2]:
        t.R = np.random.RandomState(info.seed & 0xFFFF)


class Stream(IterableDataset):
    """Workers agree on an order, and each takes its part."""

    def __init__(self) -> None:
        self.rng = random.Random(3)

    def __iter__(self) -> Any:
        order = list(range(N))
        self.rng.shuffle(order)
        info = get_worker_info()
        yield from order if info is None else order[info.id :: info.num_workers]


def test_what_streams_agree_on_is_not_seeded() -> None:
    for workers in (0, 2, 3):
        loader = stoker.DataLoader(Stream(), batch_size=BATCH, num_workers=workers, task_seeds=True)
        assert sorted(i for batch in loader for i in batch.tolist()) == list(range(N))


class NoCopy(Own):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.transform[0].lock = threading.Lock()


def test_only_what_leads_to_generators_is_copied_for_threads() -> None:
    class Large(Own):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.lock, self.seen = torch.zeros(8), threading.Lock(), set()

        def __getitem__(self, i: int) -> torch.Tensor:
            with self.lock:
                self.seen.add((id(self.table), id(self.transform)))
            return super().__getitem__(i)

    dataset = Large()
    expected = epochs(Own(), num_workers=0)
    assert epochs(dataset, num_workers=2, worker_method="thread") == expected
    assert {table for table, _ in dataset.seen} == {id(dataset.table)}
    assert id(dataset.transform) not in {transform for _, transform in dataset.seen}


class Stubborn(Own):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is one of me")


def test_a_dataset_that_cannot_be_copied_is_named() -> None:
    with pytest.warns(StokerWarning, match="^dataset.* is a single random generator"):
        epochs(Stubborn(), num_workers=2, worker_method="thread")


def test_a_generator_that_nobody_draws_from_is_no_matter() -> None:
    class Splits(Dataset):
        def __init__(self) -> None:
            self.rng = random.Random(1)
            self.order = self.rng.sample(range(N), N)

        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> int:
            return self.order[i]

    with warnings.catch_warnings():
        warnings.simplefilter("error", StokerWarning)
        loader = stoker.DataLoader(Splits(), batch_size=BATCH, num_workers=2, worker_method="thread")
        assert sorted(i for batch in loader for i in batch.tolist()) == list(range(N))


class Counts(Dataset):
    """A new generator for each sample, as ``np.random.default_rng([seed, i])`` is used: nothing to seed."""

    def __init__(self) -> None:
        self.calls = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        self.calls += 1
        self.rng = random.Random(i)
        return torch.tensor([i, self.rng.random()])


def test_few_tasks_are_run_twice() -> None:
    dataset = Counts()
    assert epochs(dataset, num_workers=0) == epochs(Counts(), num_workers=2)
    assert dataset.calls <= 2 * N + 4 * BATCH


@pytest.mark.slow
def test_a_cache_changes_no_bit() -> None:
    def prepare(x: torch.Tensor) -> torch.Tensor:
        return x

    base = InCollate()
    augment = Flip()
    kw: dict[str, Any] = {"collate_fn": functools.partial(default_collate)}
    expected = epochs(stoker.Staged(base, prepare=tensor, augment=augment, cache=None), num_workers=0, **kw)
    for workers in (0, 2):
        staged = stoker.Staged(base, prepare=tensor, augment=augment)
        assert epochs(staged, num_workers=workers, **kw) == expected


def tensor(x: float) -> torch.Tensor:
    return torch.tensor([x], dtype=torch.float64)
