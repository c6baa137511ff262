"""Save and resume: the rest of a run is that of the run which nobody stopped, to the bit."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import stoker
from stoker.core.errors import StateError, StokerError, StokerWarning
from stoker.core.random_state import set_from_text
from tests.helpers import draw

EPOCHS = 3
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This run began with"),
]


class Augmented(Dataset[Any]):
    def __init__(self, n: int = 11, augment: bool = True) -> None:
        self.n, self.augment = n, augment

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return (i, *draw()) if self.augment else i


def of_worker(n: int) -> range:
    info = get_worker_info()
    return range(n) if info is None else range(info.id, n, info.num_workers)


class Stream(IterableDataset[Any]):
    """Divides itself by worker, shuffles a little, and has no state."""

    def __init__(self, n: int = 11, augment: bool = True) -> None:
        self.n, self.augment = n, augment

    def __iter__(self) -> Iterator[Any]:
        for i in of_worker(self.n):
            yield (i, *draw()) if self.augment else i


class Counted:
    def __init__(self, items: range, augment: bool) -> None:
        self.items, self.augment, self.at = items, augment, 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.items):
            raise StopIteration
        i = self.items[self.at]
        self.at += 1
        return (i, *draw()) if self.augment else i

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StatefulStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        return Counted(of_worker(self.n), self.augment)


def plain(batch: Any) -> Any:
    if isinstance(batch, (list, tuple)):
        return [plain(b) for b in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def loader_of(dataset: Any, workers: Any, method: str = "process", **more: Any) -> stoker.DataLoader[Any]:
    return stoker.DataLoader(dataset, num_workers=workers, worker_method=method, **{"batch_size": 2, **more})


def run(loader: Any, epochs: int = EPOCHS) -> tuple[list[list[Any]], list[list[Any]]]:
    """Every batch of every epoch, and a state before the first, after each, and after the end."""
    batches, states = [], []
    for _ in range(epochs):
        it = iter(loader)
        batches.append([])
        states.append([saved(loader)])
        for batch in it:
            batches[-1].append(plain(batch))
            states[-1].append(saved(loader))
        states[-1].append(saved(loader))
    return batches, states


def saved(loader: Any) -> str:
    text = json.dumps(loader.state_dict())
    assert len(text) < 10_000
    return text


def resume(loader: Any, state: str) -> None:
    """As a script does that has saved ``torch.get_rng_state()``, too."""
    loader.load_state_dict(json.loads(state))
    torchs = json.loads(state)["torch_rng"]
    if torchs is not None:
        set_from_text(torch.default_generator, torchs)


def rest(loader: Any, state: str, epochs: int) -> list[list[Any]]:
    torch.manual_seed(987)  # another process
    random.seed(987)
    resume(loader, state)
    return [[plain(b) for b in loader] for _ in range(epochs)]


def check_everywhere(before: Any, after: Any, step: int = 1) -> None:
    """``before`` and ``after`` make loaders: a run by one is resumed by the other at every batch."""
    torch.manual_seed(7)
    random.seed(7)
    whole, states = run(before())
    places = [(e, k) for e, of_epoch in enumerate(states) for k in range(len(of_epoch))]
    for e, k in places[::step]:
        ended = k == len(whole[e]) + 1
        wanted = whole[e + 1 :] if ended else [whole[e][k:], *whole[e + 1 :]]
        assert rest(after(), states[e][k], len(wanted)) == wanted, (e, k)


# -- at every batch

KINDS = [(1, "process"), (0, "process"), (3, "process"), (3, "thread")]
OTHER = [(2, "process"), (2, "thread")]
DATASETS = {"map": Augmented, "iterable": Stream, "stateful": StatefulStream}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "workers", "before", "method"),
    [
        ("map", 3, "thread", "thread"),
        ("stateful", 0, "process", "thread"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("map", 3, "process", "process"),
                ("map", 0, "process", "process"),
                ("iterable", 1, "process", "thread"),
                ("iterable", 3, "process", "process"),
                ("stateful", 3, "thread", "process"),
                ("stateful", 3, "process", "process"),
            )
        ),
    ],
)
def test_every_batch_of_three_epochs_with_other_workers(name: str, workers: int, before: str, method: str) -> None:
    """Random augmentation included, since random state is set per task."""
    more = {"task_seeds": True, "shuffle": True if name == "map" else None}
    check_everywhere(
        lambda: loader_of(DATASETS[name](), workers, before, **more),
        lambda: loader_of(DATASETS[name](), 2, method, **more),
        step=1 if method == "thread" or (name, workers, before) == ("map", 3, "process") else 3,
    )


def test_auto_and_back_to_the_main_process() -> None:
    auto = {"shuffle": True, "generator": None}
    check_everywhere(
        lambda: loader_of(Augmented(), "auto", **auto),
        lambda: loader_of(Augmented(), 0, task_seeds=True, **auto),
        step=3,
    )


def test_task_seeds_come_with_the_state() -> None:
    check_everywhere(
        lambda: loader_of(Augmented(), 0, task_seeds=True), lambda: loader_of(Augmented(), 2, "thread"), step=3
    )


@pytest.mark.slow
@pytest.mark.parametrize(("n", "m"), [(3, 2), (0, 2), (1, 3)])
def test_an_iterable_dataset_keeps_its_parts(n: int, m: int) -> None:
    """Also where torch seeds by worker: each part has the random state of its own worker."""
    seeds = {"task_seeds": True} if n == 0 else {}
    check_everywhere(lambda: loader_of(Stream(), n, **seeds), lambda: loader_of(Stream(), m, **seeds), step=4)


@settings(max_examples=12, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_whatever_is_drawn(data: st.DataObject) -> None:
    draw_ = data.draw
    n = draw_(st.integers(1, 23), label="n")
    size = draw_(st.integers(1, 5), label="batch_size")
    name = draw_(st.sampled_from(["map", "stateful", "iterable"]), label="dataset")
    before, after = (
        draw_(st.sampled_from(KINDS), label="before"),
        draw_(st.sampled_from([*KINDS, *OTHER]), label="after"),
    )
    if name != "map" and before[0] > 1 and after[0] == 0:
        after = (1, "thread")
    more: dict[str, Any] = {
        "batch_size": size,
        "drop_last": draw_(st.booleans(), label="drop_last"),
        "task_seeds": True,
    }
    if name == "map":
        more["shuffle"] = draw_(st.sampled_from([True, False, "feistel"]), label="shuffle")
    seed = draw_(st.none() | st.integers(0, 99), label="generator")

    def build(workers: int, method: str) -> Any:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return loader_of(DATASETS[name](n), workers, method, generator=generator, **more)

    torch.manual_seed(draw_(st.integers(0, 99), label="seed"))
    whole, states = run(build(*before))
    e = draw_(st.integers(0, EPOCHS - 1), label="epoch")
    k = draw_(st.integers(0, len(states[e]) - 1), label="batch")
    wanted = whole[e + 1 :] if k == len(whole[e]) + 1 else [whole[e][k:], *whole[e + 1 :]]
    assert rest(build(*after), states[e][k], len(wanted)) == wanted


# -- samplers


class Eager(Sampler[int]):
    """Draws its order when it is started, from whichever generator."""

    def __init__(self, order: Callable[[], list[int]]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self.order())


class Lazy(Eager):
    def __iter__(self) -> Iterator[int]:
        yield from self.order()


class OwnPlace(Sampler[int]):
    """As torchdata's distributed sampler: its place is its own, and at an epoch's end stays at the end."""

    def __init__(self) -> None:
        self.given, self.resumed = 0, 0

    def __iter__(self) -> Iterator[int]:
        self.given, self.resumed = self.resumed, 0
        for i in range(self.given, 11):
            self.given += 1
            yield i * 3 % 11

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resumed = state["given"]


class OwnEpoch(Sampler[int]):
    """Its place and its epoch are its own, and at an epoch's end it is at the next one's beginning."""

    def __init__(self) -> None:
        self.epoch, self.at = 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 11:
            self.at += 1
            yield (self.at + self.epoch) % 11
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class StatefulIterator(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return Counted(range(11), augment=False)


def fixed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def torch_order() -> list[int]:
    return torch.randperm(11).tolist()


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "one generator for all": lambda: {"shuffle": True, "generator": fixed(5)},
    "its own generator": lambda: {"sampler": RandomSampler(range(11), generator=fixed(3))},
    "two generators": lambda: {"sampler": RandomSampler(range(11), generator=fixed(3)), "generator": fixed(4)},
    "replacement": lambda: {"sampler": RandomSampler(range(11), True, 40)},
    "replacement, generator": lambda: {"sampler": RandomSampler(range(11), True, 40, fixed(4))},
    "more than there are": lambda: {"sampler": RandomSampler(range(11), num_samples=27, generator=fixed(4))},
    "weighted": lambda: {"sampler": WeightedRandomSampler(torch.arange(11.0) + 1, 17)},
    "subset": lambda: {"sampler": SubsetRandomSampler(list(range(3, 11)), generator=fixed(2))},
    "lazy": lambda: {"sampler": Lazy(torch_order)},
    "own place": lambda: {"sampler": OwnPlace()},
    "own epoch": lambda: {"sampler": OwnEpoch()},
    "stateful iterator": lambda: {"sampler": StatefulIterator()},
    "batch sampler": lambda: {"batch_size": 1, "batch_sampler": BatchSampler(Lazy(torch_order), 3, True)},
    "batches": lambda: {"batch_size": 1, "batch_sampler": [[1, 2], [3], [4, 5, 6], [7]]},
    "no batches": lambda: {"batch_size": None, "shuffle": True},
    "no batches, own place": lambda: {"batch_size": None, "sampler": OwnPlace()},
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "persistent"),
    [
        *((name, False) for name in SAMPLERS),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("two generators", "own epoch", "lazy")),
    ],
)
def test_samplers(name: str, persistent: bool) -> None:
    """None is asked for what was seen, whoever holds its random state."""

    def build(workers: int, method: str = "thread") -> Any:
        more = {"task_seeds": True, "persistent_workers": persistent and workers > 0, **SAMPLERS[name]()}
        return loader_of(Augmented(), workers, method, **more)

    check_everywhere(lambda: build(2 if persistent else 0), lambda: build(3 if persistent else 2), step=2)
    if not persistent:
        check_everywhere(lambda: build(2), lambda: build(0), step=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["one generator for all", "lazy", "own place", "own epoch", "stateful iterator", "batches", "iterable", "stateful"],
)
def test_killed_again_and_again(name: str) -> None:
    """Each time after a batch, and once before any."""
    kinds = itertools.cycle([(2, "thread"), (1, "thread"), (3, "thread")])

    def build(workers: int, method: str = "thread") -> Any:
        more = SAMPLERS[name]() if name in SAMPLERS else {}
        dataset = Augmented() if name in SAMPLERS else DATASETS[name]()
        return loader_of(dataset, workers, method, task_seeds=True, **more)

    torch.manual_seed(7)
    random.seed(7)
    whole = [b for of_epoch in run(build(3))[0] for b in of_epoch]
    torch.manual_seed(7)
    random.seed(7)
    got: list[Any] = []
    loader = build(3)
    while len(got) < len(whole):
        it = iter(loader)
        got += [plain(b) for b in itertools.islice(it, 1)]
        state = saved(loader)
        torch.manual_seed(len(got))
        loader = build(*next(kinds))
        resume(loader, state)
        if len(got) % 3 == 0:
            iter(loader)
            state = saved(loader)
            loader = build(*next(kinds))
            resume(loader, state)
    assert got == whole


@pytest.mark.few(1)
@pytest.mark.parametrize("of", ["torch", "python", "numpy"])
def test_the_rest_of_an_epoch_whose_sampler_draws_when_it_is_started(of: str) -> None:
    """Later epochs of Python's and NumPy's are the script's to put back; and torch starts a sampler twice with workers."""
    orders: dict[str, Callable[[], list[int]]] = {
        "torch": torch_order,
        "python": lambda: random.sample(range(11), 11),
        "numpy": lambda: np.random.permutation(11).tolist(),
    }
    for n, m in itertools.product((0, 2), repeat=2):
        whole, states = run(loader_of(Augmented(), n, "thread", task_seeds=True, sampler=Eager(orders[of])))
        for e, k in itertools.product(range(EPOCHS), (1, 3, 6)):
            loader = loader_of(Augmented(), m, "thread", task_seeds=True, sampler=Eager(orders[of]))
            assert rest(loader, states[e][k], 1) == [whole[e][k:]]


def test_nothing_is_loaded_to_get_there() -> None:
    class Asked(Augmented):
        def __init__(self) -> None:
            super().__init__(10**4)
            self.seen: list[int] = []

        def __getitem__(self, i: int) -> int:
            self.seen.append(i)
            return i

    for shuffle in (True, "feistel", False):
        whole = [plain(b) for b in loader_of(range(10**4), 0, batch_size=100, shuffle=shuffle, generator=fixed(3))]
        loader = loader_of(range(10**4), 0, batch_size=100, shuffle=shuffle, generator=fixed(3))
        it = iter(loader)
        for _ in range(90):
            next(it)
        asked = Asked()
        resumed = loader_of(asked, 0, batch_size=100, shuffle=shuffle, generator=fixed(3))
        assert rest(resumed, saved(loader), 1) == [whole[90:]]
        assert len(asked.seen) == 1000


def test_another_batch_size() -> None:
    whole = [plain(b) for b in loader_of(range(20), 0, batch_size=1, shuffle=True, generator=fixed(1))]
    loader = loader_of(range(20), 0, batch_size=3, shuffle=True, generator=fixed(1))
    it = iter(loader)
    for _ in range(4):
        next(it)
    state = saved(loader)
    again = loader_of(range(20), 2, batch_size=4, shuffle=True, generator=fixed(1))
    assert [i for b in rest(again, state, 1)[0] for i in b] == [i for b in whole[12:] for i in b]


@pytest.mark.slow
def test_out_of_order_nothing_is_lost_or_seen_twice() -> None:
    class Slow(Augmented):
        def __getitem__(self, i: int) -> int:
            while i == 0 and not released.exists():
                pass
            return i

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        released = Path(folder) / "go"
        loader = loader_of(Slow(12), 2, batch_size=1, in_order=False)
        it = iter(loader)
        seen = [int(next(it)) for _ in range(3)]
        places = [(list(seen), saved(loader))]
        released.touch()
        assert 0 not in seen
        for batch in it:
            seen.append(int(batch))
            places.append((list(seen), saved(loader)))
        late = seen.index(0) - 2  # from here on the first that is due is one that was seen before it was
        for (seen, state), workers in itertools.product([places[0], *places[late : late + 3]], [0, 1, 2]):
            again = loader_of(Slow(12), workers, batch_size=1, in_order=False)
            assert sorted(seen + [i for b in rest(again, state, 1)[0] for i in b]) == list(range(12))
            if not workers and len(seen) < 10:  # and it can be left in mid-epoch and taken up once more
                again.load_state_dict(json.loads(state))
                more = [int(batch) for _, batch in zip(range(2), again, strict=False)]
                last = rest(loader_of(Slow(12), 1, batch_size=1, in_order=False), saved(again), 1)[0]
                assert sorted(seen + more + [i for b in last for i in b]) == list(range(12))


def test_a_state_that_names_the_first_that_is_due_as_seen() -> None:
    """As earlier versions wrote it."""
    loader = loader_of(range(12), 0, batch_size=1)
    iter(loader)
    state = {**json.loads(saved(loader)), "next": 3, "samples": 3, "ahead": [3, 5]}
    for workers in (0, 2):
        got = rest(loader_of(range(12), workers, batch_size=1), json.dumps(state), 1)[0]
        assert got == [[4], *([i] for i in range(6, 12))]


def in_base_85(text: str) -> str:
    return base64.b85encode(base64.b64decode(text[1:])).decode()


def test_a_state_of_version_1_is_read() -> None:
    """Its random state is in base 85."""
    torch.manual_seed(3)
    loader = loader_of(range(12), 0, shuffle=True, batch_size=1)
    it = iter(loader)
    next(it)
    state = json.loads(saved(loader))
    rngs = {name: in_base_85(text) for name, text in json.loads(state["sampler_rng"]).items()}
    old = {**state, "stoker": 1, "torch_rng": in_base_85(state["torch_rng"]), "sampler_rng": json.dumps(rngs)}
    again = loader_of(range(12), 2, shuffle=True, batch_size=1)
    assert rest(again, json.dumps(old), 1)[0] == [b.tolist() for b in it]


def test_keys_of_others_are_left_alone() -> None:
    """accelerate adds one to the state dict of whatever loader it prepares."""
    loader = loader_of(range(12), 0, batch_size=1)
    next(iter(loader))
    state = {**json.loads(saved(loader)), "_iterator_finished": False}
    again = loader_of(range(12), 0, batch_size=1)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert [int(b) for b in again] == list(range(1, 12))


@pytest.mark.parametrize("workers", [0, 2])
def test_random_state_that_has_not_moved_is_not_encoded_again(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks ask for the state after each step."""
    encoded: list[bytes] = []
    before = zlib.compress
    monkeypatch.setattr(zlib, "compress", lambda raw, level: encoded.append(raw) or before(raw, level))
    torch.seed()
    loader = loader_of(range(40), workers, shuffle=True, batch_size=2)
    counts = []
    for _ in loader:
        loader.state_dict()
        counts.append(len(encoded))
    assert counts[0] == 2  # where the order was drawn, and where the generator is now
    assert counts[-1] == 2
    for _ in range(3):
        torch.rand(())
        loader.state_dict()
    assert len(encoded) == 5


# -- ranks


def ranks(n: int, world: int, states: list[str] | None, take: int | None, **more: Any) -> tuple[list[Any], list[str]]:
    """What each rank gets, and its state then."""
    seen, after = [], []
    for rank in range(world):
        sampler = DistributedSampler(range(n), world, rank, seed=3, **more)
        sampler.set_epoch(4 if states is None else 0)
        loader = loader_of(range(n), 0, sampler=sampler)
        if states is not None:
            loader.load_state_dict(json.loads(states[rank % len(states)]))
        it = iter(loader)
        seen.append([plain(b) for b in itertools.islice(it, take)])
        after.append(saved(loader))
    return seen, after


def flat(seen: list[Any]) -> list[int]:
    return [i for rank in seen for batch in rank for i in batch]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@example([3, 5, 3, 1], 3, 1, False)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(0, 3), st.integers(1, 6), st.booleans())
def test_another_number_of_ranks(worlds: list[int], take: int, times: int, shuffle: bool) -> None:
    """Ranks come and go, one time after the other; the whole of an epoch is seen, each sample once."""
    n = 60 * times  # divisible by all
    seen: list[int] = []
    states: list[str] | None = None
    for i, world in enumerate(worlds):
        last = i == len(worlds) - 1
        got, states = ranks(n, world, states, None if last else take, shuffle=shuffle)
        seen += flat(got)
        if len(set(seen)) == n:
            break  # ranks that have met its end begin the next epoch
    left = n - len(set(seen))
    extra = len(seen) - len(set(seen))
    assert left == 0
    assert extra < max(worlds)  # what DistributedSampler adds at the end, so that all ranks have as many
    got, _ = ranks(n, 1, None, None, shuffle=shuffle)
    assert sorted(set(seen)) == sorted(flat(got))


def test_as_many_ranks_go_on_to_the_bit_and_any_rank_s_state_will_do() -> None:
    whole, _ = ranks(47, 3, None, None)
    begun, states = ranks(47, 3, None, 4)
    for rank in range(3):
        again, _ = ranks(47, 3, [states[rank]], None)
        assert [b + a for b, a in zip(begun, again, strict=True)] == whole


# -- datasets with a state of their own


class Memory(Augmented):
    """Its samples depend on how many were asked for."""

    def __init__(self) -> None:
        super().__init__(12)
        self.asked = 0

    def __getitem__(self, i: int) -> Any:
        self.asked += 1
        return i, self.asked

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked, "tensor": torch.arange(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["tensor"], torch.arange(2))
        self.asked = state["asked"]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("workers", "method"), [(0, "process"), (2, "process"), (2, "thread")])
@pytest.mark.few(1)
def test_a_stateful_map_dataset(workers: int, method: str, persistent: bool) -> None:
    def build() -> Any:
        many = workers if method == "process" else 1
        return loader_of(Memory(), many, method, persistent_workers=persistent and workers > 0)

    def through(state: dict[str, Any]) -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
        return loaded

    loader = build()
    whole, states = [], []
    for _ in range(2):
        whole.append([])
        it = iter(loader)
        states.append([loader.state_dict()])
        for batch in it:
            whole[-1].append(plain(batch))
            states[-1].append(loader.state_dict())
        states[-1].append(loader.state_dict())
    for e, k in itertools.product(range(2), range(8)):
        again = build()
        again.load_state_dict(through(states[e][k]))
        wanted = [whole[e][k:], *whole[e + 1 :]] if k < 7 else whole[e + 1 :]
        got = [[plain(b) for b in again] for _ in wanted]
        assert got == wanted, (e, k)


class CountsEpochs(StatefulStream):
    """As its workers' copies live on, so does what they count."""

    epoch, at, resumed = 0, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.resumed = self.resumed, 0
        for i in of_worker(self.n)[self.at :]:
            self.at += 1
            yield i + 100 * self.epoch
        self.epoch += 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.resumed = state["epoch"], state["at"]


@pytest.mark.few(1)
@pytest.mark.parametrize("n", [0, 3])
def test_an_iterable_dataset_that_lives_on(n: int) -> None:
    def build() -> Any:
        return loader_of(CountsEpochs(11), n, persistent_workers=n > 0)

    check_everywhere(build, build, step=2)


@pytest.mark.few(1)
@pytest.mark.parametrize(("n", "m"), [(2, 3), (3, 2)])
def test_its_parts_are_nobody_else_s(n: int, m: int) -> None:
    def build(workers: int) -> Any:
        return loader_of(CountsEpochs(11), workers, "thread", persistent_workers=True)

    check_everywhere(lambda: build(n), lambda: build(m))


def test_states_that_differ_cannot_be_divided() -> None:
    loader = loader_of(Memory(), 2)
    it = iter(loader)
    for _ in range(3):
        next(it)
    state = loader.state_dict()
    del it
    again = loader_of(Memory(), 1)
    again.load_state_dict(state)
    with pytest.raises(
        StateError, match=r"different dataset states for 2 workers, but this loader has 1\. Set num_workers=2"
    ):
        iter(again)


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 2, 5, None])
def test_states_now_and_then(every: int | None) -> None:
    check_everywhere(
        lambda: loader_of(StatefulStream(), 3, task_seeds=True, snapshot_every_n_steps=every),
        lambda: loader_of(StatefulStream(), 2, "thread", task_seeds=True),
        step=5,
    )


def test_a_dataset_that_does_not_take_its_state() -> None:
    class Refuses(StatefulStream):
        def __iter__(self) -> Iterator[Any]:
            counted = Counted(of_worker(self.n), False)
            counted.load_state_dict = lambda state: 1 / 0  # type: ignore[method-assign]
            return counted

    for workers, method in ((0, "process"), (1, "process"), (1, "thread")):
        loader = loader_of(StatefulStream(), 1)
        next(iter(loader))
        again = loader_of(Refuses(), workers, method)
        again.load_state_dict(loader.state_dict())
        with pytest.raises(StateError, match=r"rejected its state: ZeroDivisionError"):
            next(iter(again))


# -- the protocol


def test_before_in_and_after() -> None:
    loader = loader_of(range(6), 1)
    before = loader.state_dict()
    assert loader.state_dict() == before
    it = iter(loader)
    assert plain(next(it)) == [0, 1]
    loader.load_state_dict(before)
    assert loader.state_dict() == before
    assert [plain(b) for b in loader] == [[0, 1], [2, 3], [4, 5]]
    for batch in loader:
        assert plain(batch)
        last = loader.state_dict()
    ended = loader.state_dict()
    again = loader_of(range(6), 0)
    again.load_state_dict(last)
    assert [len(list(again)) for _ in range(2)] == [0, 3]
    again.load_state_dict(ended)
    assert [len(list(again)) for _ in range(2)] == [3, 3]


def test_a_break_is_no_loss() -> None:
    for workers in (0, 2):
        loader = loader_of(range(8), workers)
        for batch in loader:
            assert plain(batch) == [0, 1]
            break
        state = loader.state_dict()
        assert rest(loader_of(range(8), 1), json.dumps(state), 1) == [[[2, 3], [4, 5], [6, 7]]]


def test_nothing_resets() -> None:
    loader = loader_of(range(6), 0)
    it = iter(loader)
    next(it)
    loader.load_state_dict(loader.state_dict())
    loader.load_state_dict({})
    assert len(list(loader)) == 3


def test_errors_count_as_delivered() -> None:
    class Odd(Augmented):
        def __getitem__(self, i: int) -> int:
            if i == 2:
                raise KeyError(i)
            return i

    for workers in (0, 2):
        loader = loader_of(Odd(6), workers, batch_size=1)
        it = iter(loader)
        next(it), next(it)
        with pytest.raises(KeyError):
            next(it)
        assert rest(loader_of(Odd(6), 1, batch_size=1), saved(loader), 1) == [[[3], [4], [5]]]


def test_who_never_asks_sees_nothing_of_it() -> None:
    """A resumed iterator draws nothing more from the process' generators than what the saved run had not drawn."""
    loader = loader_of(Augmented(), 2, shuffle=True, task_seeds=True)
    it = iter(loader)
    next(it)
    state = loader.state_dict()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    again = loader_of(Augmented(), 0, shuffle=True, task_seeds=True)
    again.load_state_dict(state)
    list(again)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_a_script_that_puts_torch_s_generator_back() -> None:
    """Dropout draws from it, too: later epochs are drawn from the real one then."""

    def epoch(loader: Any, skip: int = 0) -> list[Any]:
        out = []
        for batch in loader:
            out.append((plain(batch), float(torch.rand(()))))
        return out

    torch.manual_seed(3)
    loader = loader_of(Augmented(), 2, shuffle=True, task_seeds=True)
    it = iter(loader)
    whole = [(plain(next(it)), float(torch.rand(())))]
    state, real = loader.state_dict(), torch.get_rng_state()
    whole = [epoch(it), epoch(loader), epoch(loader)]
    torch.manual_seed(99)
    again = loader_of(Augmented(), 3, "thread", shuffle=True, task_seeds=True)
    again.load_state_dict(state)
    torch.set_rng_state(real)
    assert [epoch(again) for _ in range(3)] == whole


def test_seeds_by_worker_are_said_where_they_matter() -> None:
    """Order and samples hold; random numbers do not, and that is said only where some are drawn."""
    for augment in (True, False):
        loader = loader_of(Augmented(12, augment), 2)
        it = iter(loader)
        next(it)
        state = loader.state_dict()
        again = loader_of(Augmented(12, augment), 2)
        again.load_state_dict(state)
        with pytest.warns(StokerWarning, match="task_seeds=True") if augment else warnings.catch_warnings():
            if not augment:
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", "This DataLoader will create")
            assert [plain(b)[0] if augment else plain(b) for b in again] == [[i, i + 1] for i in range(2, 12, 2)]


def test_seeds_by_task_in_the_middle_of_a_run_are_said() -> None:
    loader = loader_of(Augmented(), 2)
    it = iter(loader)
    next(it)
    state = loader.state_dict()
    for again in (loader_of(Augmented(), 0, task_seeds=True), loader_of(Augmented(), 2, task_seeds=True)):
        again.load_state_dict(state)
        with pytest.warns(StokerWarning, match="random augmentation differs"):
            iter(again)


@pytest.mark.slow
def test_at_an_epoch_s_border_seeds_by_worker_hold_as_well() -> None:
    whole, states = run(loader_of(Augmented(), 2, generator=fixed(3), shuffle=True))
    for e in range(EPOCHS):
        for k in (0, -1):
            wanted = whole[e + (k == -1) :]
            assert (
                rest(loader_of(Augmented(), 2, generator=fixed(3), shuffle=True), states[e][k], len(wanted)) == wanted
            )


# -- what it is


def test_small_for_a_billion_samples() -> None:
    for more in ({"shuffle": "feistel"}, {"shuffle": "feistel", "generator": fixed(1)}, {}):
        loader = loader_of(range(10**9), 0, batch_size=256, **more)
        it = iter(loader)
        for _ in range(3):
            next(it)
        assert len(saved(loader)) < 10_000
        state = loader.state_dict()
        state["next"], state["samples"] = 10**6, 256 * 10**6
        again = loader_of(
            range(10**9), 0, batch_size=256, **{**more, **({"generator": fixed(1)} if "generator" in more else {})}
        )
        again.load_state_dict(state)
        assert len(next(iter(again))) == 256


def test_with_the_model_in_one_file(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    loader = loader_of(range(8), 0)
    next(iter(loader))
    torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, tmp_path / "checkpoint.pt")
    found = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert rest(loader_of(range(8), 0), json.dumps(found["loader"]), 1) == [[[2, 3], [4, 5], [6, 7]]]


@pytest.mark.slow
def test_distributed_checkpoint(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    model = torch.nn.Linear(2, 2)
    for name, dataset, more in (("map", range(8), {"shuffle": True}), ("stream", StatefulStream(12, False), {})):
        loader = loader_of(dataset, 1, "thread", **more)
        it = iter(loader)
        next(it)
        dcp.save({"model": model, "loader": loader}, checkpoint_id=str(tmp_path / name))
        wanted = [plain(b) for b in it]
        again = loader_of(dataset, 1, "thread", **more)
        other = torch.nn.Linear(2, 2)
        dcp.load({"model": other, "loader": again}, checkpoint_id=str(tmp_path / name))
        assert [plain(b) for b in again] == wanted
        assert torch.equal(other.weight, model.weight)


def test_torch_s_generator_that_was_not_put_back_is_said() -> None:
    """The epoch that is resumed is the same without it; the next one is not."""
    for more in ({}, {"generator": fixed(3)}):
        loader = loader_of(range(40), 2, shuffle=True, **more)
        it = iter(loader)
        next(it)
        state, wanted = loader.state_dict(), [plain(b) for b in it]
        torch.manual_seed(5)
        again = loader_of(range(40), 2, shuffle=True, **more)
        again.load_state_dict(state)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [plain(b) for b in again] == wanted
        said = [str(w.message) for w in caught if "torch.set_rng_state()" in str(w.message)]
        assert len(said) == (0 if more else 1)


@pytest.mark.slow
def test_a_staged_dataset() -> None:
    def build(workers: int) -> Any:
        data = stoker.Staged(range(24), prepare=lambda i: torch.tensor(i), augment=lambda x: x + torch.rand(()))
        return loader_of(data, workers, shuffle=True, task_seeds=True)

    check_everywhere(lambda: build(2), lambda: build(1), step=6)


def test_debug_and_installed() -> None:
    loader = loader_of(range(8), 2, debug=True)
    next(iter(loader))
    assert rest(loader_of(range(8), 1), saved(loader), 1) == [[[2, 3], [4, 5], [6, 7]]]
    with stoker.installed():
        assert len(list(torch.utils.data.DataLoader(StatefulStream(8), 2, num_workers=1))) == 4


def test_a_state_that_cannot_be_taken_is_said_to_who_asks() -> None:
    class Broken(StatefulStream):
        def __iter__(self) -> Iterator[Any]:
            counted = Counted(of_worker(self.n), False)
            counted.state_dict = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
            return counted

    for workers in (0, 1):
        loader = loader_of(Broken(8), workers)
        it = iter(loader)
        assert plain(next(it)) == [0, 1]
        with pytest.raises(StateError, match="of the dataset or sampler failed: ZeroDivisionError"):
            loader.state_dict()
        assert len(list(it)) == 3


def a_state(dataset: Any = range(8), **more: Any) -> dict[str, Any]:
    loader = loader_of(dataset, 0, **(more or {"shuffle": True}))
    next(iter(loader))
    return loader.state_dict()


FUZZED: list[tuple[str, Any, Callable[[], dict[str, Any]]]] = [
    ("shuffled", range(8), lambda: {"shuffle": True}),
    ("generator", range(8), lambda: {"shuffle": True, "generator": fixed(1)}),
    ("own epoch", range(11), lambda: {"sampler": OwnEpoch()}),
    ("ranks", range(13), lambda: {"sampler": DistributedSampler(range(13), 2, 1)}),
    ("iterable", Stream(8), lambda: {"collate_fn": None}),
    ("stateful", StatefulStream(8), lambda: {"collate_fn": None}),
]


def test_what_is_wrong_is_named() -> None:
    good = a_state()
    loader = loader_of(range(8), 0, shuffle=True)
    for state, words in (
        (b"\x80", "the state dict must be a dict, not b"),
        ({"epoch": 1}, "has no key 'stoker'"),
        ({"_snapshot": 1}, "was saved by torchdata's StatefulDataLoader, and only that loader"),
        ({**good, "stoker": 99}, "version 99, but this stoker reads up to version 3. Upgrade stoker"),
        ({k: v for k, v in good.items() if k != "next"}, "lacks 'next'"),
        ({**good, "next": -1}, "next=-1"),
        ({**good, "torch_rng": "rubbish"}, "torch_rng='rubbish'"),
        ({**good, "kind": "iterable"}, "parts"),
        ({**good, "sampler_rng": torch.zeros(3)}, "sampler_rng=tensor"),
    ):
        with pytest.raises(StateError, match=words):
            loader.load_state_dict(state)
    for other, words in (
        (loader_of(range(9), 0, shuffle=True), "8 samples in random order; this loader has 9"),
        (loader_of(range(8), 0), "with order RandomSampler; this loader's order is SequentialSampler"),
        (loader_of(range(8), 0, shuffle="feistel"), "this loader's order is FeistelSampler"),
        (loader_of(range(8), 0, shuffle=True, generator=fixed(1)), "drawn from"),
        (loader_of(range(8), 0, shuffle=True, batch_size=None), "batch_size=2; this loader has batch_size=None"),
        (loader_of(Stream(), 0), "a dataset that is map-style; this loader's dataset is iterable-style"),
    ):
        other.load_state_dict(good)
        for _ in range(2):  # trying again does not begin a new run
            with pytest.raises(StateError, match=words):
                iter(other)


class Foreign:
    """A sampler that only it knows the order of."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "kw",
    [{}, {"shuffle": True}, {"sampler": Foreign()}, {"shuffle": "feistel"}],
    ids=["in order", "shuffled", "own", "feistel"],
)
def test_a_place_beyond_the_dataset_is_an_error_and_no_empty_epoch(kw: dict[str, Any], workers: int) -> None:
    def loader(batch_size: int = 3) -> Any:
        return stoker.DataLoader(range(8), batch_size=batch_size, num_workers=workers, **kw)

    first = loader()
    it = iter(first)
    states = [first.state_dict()] + [first.state_dict() for _ in it]
    for state in states:  # the last one is at index 9
        loader().load_state_dict(state)
    assert states[-1]["samples"] == 9
    other = loader()
    other.load_state_dict(states[-1])
    assert [len(x) for x in other] in ([], [3, 3, 2])
    for samples in (11, 1 << 40, (1 << 63) - 1):
        other = loader()
        other.load_state_dict({**states[1], "samples": samples})
        with pytest.raises(StateError, match=r"this loader's sampler has (fewer than )?[0-9,]+ indices"):
            list(other)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rubbish_is_an_error_of_stoker_s_own(data: st.DataObject) -> None:
    name, dataset, more = data.draw(st.sampled_from(FUZZED))
    good = a_state(dataset, **more())
    what = data.draw(st.sampled_from(["any", "bytes", "one", "flip"]))
    if what == "any":
        state = data.draw(JSON)
    elif what == "bytes":
        state = data.draw(st.binary())
    else:
        key = data.draw(st.sampled_from(sorted(good)))
        value = data.draw(JSON)
        if what == "flip" and isinstance(good[key], str) and good[key]:
            at = data.draw(st.integers(0, 1 << 20)) % len(good[key])  # random state as text is not always as long
            value = good[key][:at] + data.draw(st.characters()) + good[key][at + 1 :]
        elif what == "flip" and type(good[key]) is int:
            value = good[key] + data.draw(st.integers(-3, 3))
        state = {**good, key: value}
    loader = loader_of(dataset, data.draw(st.sampled_from([0, 2])), "thread", **more())
    try:
        loader.load_state_dict(state)
        assert len(list(loader)) <= 8, name
    except StokerError:
        return
