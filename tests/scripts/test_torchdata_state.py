"""A run that torchdata's ``StatefulDataLoader`` began goes on with stoker: the batches are those that it would give."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    get_worker_info,
)

import stoker
from stoker.core.errors import StateError
from tests.helpers import Counted

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [
    pytest.mark.scripts,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:torch's global random generator"),
]
N = 23


class Asked(Dataset[Any]):
    """A map-style dataset with a state: how many samples it was asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        self.asked += 1
        return i, self.asked

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


class Stream(IterableDataset[int]):
    """Without a state. One worker's part is shorter than another's."""

    def __init__(self, draws: bool = False) -> None:
        self.draws = draws

    def items(self) -> list[int]:
        info = get_worker_info()
        mine = [i for i in range(N) if info is None or (i % 5 == 0) == (info.id == 0)]
        return [mine[i] for i in torch.randperm(len(mine))] if self.draws else mine

    def __iter__(self) -> Iterator[int]:
        return iter(self.items())


class StatefulStream(Stream):
    """The iterator is another object than the dataset, and has the state."""

    def __iter__(self) -> Iterator[int]:
        return Counted(self.items())


class OwnIterator(Stream):
    """A dataset that is its own iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0
        self.resumed = False

    def __iter__(self) -> Iterator[int]:
        self.at = self.at if self.resumed else 0
        self.resumed = False
        return self

    def __next__(self) -> int:
        items, self.resumed = self.items(), False
        if self.at == len(items):
            raise StopIteration
        self.at += 1
        return items[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.resumed = state["at"], True


class StatefulOrder(Sampler[int]):
    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        while self.at < N:
            self.at += 1
            yield (self.at * 7) % N
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Evens(Sampler[int]):
    """No state, and not random."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter([*range(0, N, 2), *range(1, N, 2)])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def torchdata_random() -> Any:
    return torchdata.sampler.RandomSampler(range(N), generator=generator())


def torchdata_distributed() -> Any:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return StatefulDistributedSampler(range(N), 2, 1)


MAPS: dict[str, Any] = {
    "in order": lambda: (range(N), {}),
    "shuffled": lambda: (range(N), {"shuffle": True}),
    "generator": lambda: (range(N), {"shuffle": True, "generator": generator()}),
    "no batches": lambda: (range(N), {"shuffle": True, "batch_size": None}),
    "drop_last": lambda: (range(N), {"shuffle": True, "drop_last": True}),
    "dataset with a state": lambda: (Asked(), {"shuffle": True}),
    "sampler with a state": lambda: (range(N), {"sampler": StatefulOrder()}),
    "sampler without": lambda: (range(N), {"sampler": Evens()}),
    "batch sampler": lambda: (range(N), {"batch_sampler": BatchSampler(Evens(), 3, False), "batch_size": 1}),
    "ranks": lambda: (range(N), {"sampler": DistributedSampler(range(N), 2, 1)}),
    "ranks with a state": lambda: (range(N), {"sampler": torchdata_distributed()}),
    "torchdata's sampler": lambda: (range(N), {"sampler": torchdata_random()}),
}
STREAMS: dict[str, Any] = {
    "stream": lambda: (Stream(), {}),
    "stream that draws": lambda: (Stream(draws=True), {}),
    "iterator with a state": lambda: (StatefulStream(), {}),
    "its own iterator": lambda: (OwnIterator(), {}),
}


def build(cls: Any, case: Any, workers: int, **more: Any) -> Any:
    torch.manual_seed(5)
    dataset, settings = case()
    return cls(dataset, num_workers=workers, **{"batch_size": 3, **settings, **more})


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def plain(batch: Any) -> Any:
    return [plain(b) for b in batch] if isinstance(batch, (list, tuple)) else torch.as_tensor(batch).tolist()


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", [*MAPS, *STREAMS])
def test_the_rest_of_the_epoch_is_torchdata_s(name: str, workers: int, every: int) -> None:
    case = {**MAPS, **STREAMS}[name]
    if name == "stream that draws" and not workers:
        pytest.skip("is refused, below")
    if not workers and every > 1:
        pytest.skip("a setting of workers")
    for done in (0, 1, 3):
        loader = build(torchdata.StatefulDataLoader, case, workers, snapshot_every_n_steps=every)
        it = iter(loader)
        for _ in itertools.islice(it, done):
            pass
        state = through_a_file(loader.state_dict())
        wanted = [plain(b) for b in it]
        again = build(stoker.DataLoader, case, workers)
        torch.manual_seed(77)  # another process
        again.load_state_dict(state)
        got = [plain(b) for b in again]
        assert got == wanted, done
        assert len([*again]) >= len(wanted)  # the next epoch is a whole one


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["in order", "shuffled", "dataset with a state", "iterator with a state"])
def test_a_state_of_an_epoch_s_end_begins_the_next(name: str, workers: int) -> None:
    case = {**MAPS, **STREAMS}[name]
    loader = build(torchdata.StatefulDataLoader, case, workers)
    whole = len([*loader])
    again = build(stoker.DataLoader, case, workers)
    again.load_state_dict(through_a_file(loader.state_dict()))
    assert len([*again]) == whole


@pytest.mark.parametrize("before", [0, 2])
def test_what_was_resumed_can_be_saved_and_resumed_by_stoker(before: int) -> None:
    for name in ("shuffled", "generator", "no batches", "sampler without"):
        loader = build(torchdata.StatefulDataLoader, MAPS[name], before)
        it = iter(loader)
        next(it)
        state = loader.state_dict()
        wanted = [plain(b) for b in it]
        again = build(stoker.DataLoader, MAPS[name], 1)
        again.load_state_dict(state)
        assert again.state_dict().keys() == state.keys()  # not begun yet
        rest = iter(again)
        assert plain(next(rest)) == wanted[0]
        state = again.state_dict()
        last = build(stoker.DataLoader, MAPS[name], 0)
        last.load_state_dict(state)
        assert [plain(b) for b in last] == wanted[1:]


def test_another_number_of_workers() -> None:
    """Of a map-style dataset without a state any number goes on; of a stream the parts remain."""
    for name, before, now in (("shuffled", 2, 0), ("shuffled", 0, 2), ("iterator with a state", 2, 1)):
        case = {**MAPS, **STREAMS}[name]
        loader = build(torchdata.StatefulDataLoader, case, before)
        it = iter(loader)
        next(it)
        state = loader.state_dict()
        wanted = [plain(b) for b in it]
        again = build(stoker.DataLoader, case, now)
        again.load_state_dict(state)
        assert [plain(b) for b in again] == wanted


def state_after(case: Any, batches: int = 2, workers: int = 0) -> dict[str, Any]:
    loader = build(torchdata.StatefulDataLoader, case, workers)
    for _ in itertools.islice(loader, batches):
        pass
    state: dict[str, Any] = loader.state_dict()
    return state


def test_what_cannot_go_on_is_refused() -> None:
    random = lambda: (range(N), {"sampler": SubsetRandomSampler(range(N))})  # noqa: E731
    given = lambda: (range(N), {"sampler": RandomSampler(range(N))})  # noqa: E731
    for case, words in (
        (random, "SubsetRandomSampler is random, and torchdata has not saved"),
        (given, "does not have the random order"),
        (STREAMS["stream that draws"], "draws random numbers, and torchdata has not saved"),
    ):
        loader = build(stoker.DataLoader, case, 0)
        with pytest.raises(StateError, match=words):  # noqa: PT012
            loader.load_state_dict(state_after(case))
            iter(loader)
    larger = build(stoker.DataLoader, MAPS["shuffled"], 0, batch_size=4)
    with pytest.raises(StateError, match="6 samples in 2 batches: a batch size other than 4"):
        larger.load_state_dict(state_after(MAPS["shuffled"]))
    inline = build(stoker.DataLoader, STREAMS["iterator with a state"], 0)
    inline.load_state_dict(state_after(STREAMS["iterator with a state"], workers=2))
    with pytest.raises(StateError, match="2 parts, one a worker"):
        iter(inline)
    for rubbish in ({"_snapshot": 1}, {"_num_yielded": 3}, {"_snapshot": {"_main_snapshot": {"_num_workers": 0}}}):
        with pytest.raises(StateError, match="looks like torchdata's and is not"):
            larger.load_state_dict(rubbish)
    assert isinstance(larger.sampler, RandomSampler)
    assert not isinstance(larger.sampler, SequentialSampler)
