"""A run that goes on with another number of ranks: no sample lost or seen twice, or an error that says why not."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, get_worker_info

import stoker
from stoker.core.errors import StateError, StokerWarning, UsageError
from stoker.sampling import rank_states
from stoker.sampling.shard import Shard
from tests.helpers import Counted, own_generator

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This run began with"),
    pytest.mark.filterwarnings("ignore:This epoch of an iterable dataset"),
    pytest.mark.filterwarnings("ignore:torch's global random generator"),
]


class Lines(IterableDataset[int]):
    """Asks which part to read. ``shuffled``: in an order that each part draws from its worker's seed."""

    def __init__(self, n: int, shuffled: bool = False) -> None:
        self.n, self.shuffled = n, shuffled

    def __iter__(self) -> Iterator[int]:
        part = stoker.shard()
        mine = list(range(part.id, self.n, part.num_shards))
        if self.shuffled:
            mine = [mine[i] for i in torch.randperm(len(mine), generator=own_generator())]
        return iter(mine)


class StatefulLines(Lines):
    def __iter__(self) -> Iterator[int]:
        part = stoker.shard()
        return Counted(range(part.id, self.n, part.num_shards))


def be(rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this process is that rank."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))


def each_rank(
    make: Any, ranks: int, state: dict[str, Any] | None, take: int | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], dict[str, Any]]:
    """What all ranks get of an epoch, one rank after the other, and the state of all of them then."""
    seen: list[int] = []
    states = []
    for rank in range(ranks):
        be(rank, ranks, monkeypatch)
        loader = make()
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        it = iter(loader)
        seen += [i for batch in itertools.islice(it, take) for i in batch.tolist()]
        states.append(loader.state_dict())
        del it
    return seen, rank_states.join(states)


def streams(dataset: Any, workers: int, method: str = "thread", **more: Any) -> Any:
    return lambda: stoker.DataLoader(dataset, batch_size=2, num_workers=workers, worker_method=method, **more)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_an_iterable_dataset(data: st.DataObject) -> None:
    """Ranks and workers come and go, twice; ranks need not be at the same batch, and parts may be of unequal length."""
    n, stateful = data.draw(st.integers(0, 40)), data.draw(st.booleans())
    dataset = StatefulLines(n) if stateful else Lines(n, shuffled=data.draw(st.booleans()))
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 2)), min_size=2, max_size=4))
    seen: list[int] = []
    state = None
    with pytest.MonkeyPatch.context() as patch:
        for i, (ranks, workers) in enumerate(sizes):  # as many ranks as before are among them
            last = i == len(sizes) - 1
            take = None if last else data.draw(st.integers(0, 3))
            got, state = each_rank(streams(dataset, workers), ranks, state, take, patch)
            seen += got
            if all(one["finished"] for one in json.loads(state["all_ranks"])):
                break  # else the next epoch would begin
    assert sorted(seen) == list(range(n))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 3), (3, 2)])
def test_an_iterable_dataset_in_processes(before: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make = streams(Lines(37, shuffled=True), 2, "process", persistent_workers=True)
    seen, state = each_rank(make, before, None, 2, monkeypatch)
    rest, state = each_rank(make, after, state, 1, monkeypatch)
    end, state = each_rank(make, after, state, None, monkeypatch)
    assert sorted(seen + rest + end) == list(range(37))


def test_as_many_ranks_as_at_the_beginning_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are each rank's own again, and are read again in the order of the rank that began them."""
    seen, state = [], None
    for ranks, take in ((2, 1), (1, 2), (2, None)):
        got, state = each_rank(streams(Lines(40, shuffled=True), 1), ranks, state, take, monkeypatch)
        seen += got
    assert sorted(seen) == list(range(40))


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["thread", "process"])
def test_the_next_epoch_is_divided_as_a_new_run(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = streams(Lines(9), 2, method, persistent_workers=True)
    seen, state = each_rank(streams(Lines(9), 1, method), 1, None, 1, monkeypatch)
    epochs: list[list[int]] = [[*seen], []]
    for rank in range(3):  # two of them have no part to the end of the first epoch
        be(rank, 3, monkeypatch)
        loader = make()
        loader.load_state_dict(state)
        for epoch in epochs:
            epoch += [i for batch in loader for i in batch.tolist()]
        assert loader.state_dict()["division"] == [3, 2]
    assert [sorted(epoch) for epoch in epochs] == [[*range(9)], [*range(9)]]


def test_a_state_after_the_epoch_begins_the_next_with_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    make = streams(Lines(9), 1)
    be(2, 3, monkeypatch)
    loader = make()
    for _ in loader:
        pass
    state = loader.state_dict()  # of one rank
    seen, _ = each_rank(make, 2, state, None, monkeypatch)
    assert sorted(seen) == list(range(9))


@pytest.mark.slow
def test_random_augmentation_is_that_of_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """With task seeds, too, each sample is augmented as in the run that nobody stopped."""

    def seed() -> int:
        info = get_worker_info()
        assert info is not None
        return info.seed

    class Augmented(Lines):
        def __iter__(self) -> Iterator[Any]:
            return ((i, random.random(), seed()) for i in super(Augmented, self).__iter__())  # noqa: UP008

    for task_seeds in (False, True):
        make = streams(Augmented(30), 2, "process", task_seeds=task_seeds)

        def read(ranks: int, state: Any, take: int | None, make: Any = make) -> tuple[list[Any], Any]:
            out, states = [], []
            for rank in range(ranks):
                be(rank, ranks, monkeypatch)
                torch.manual_seed(rank)
                loader = make()
                if state is not None:
                    loader.load_state_dict(state)
                it = iter(loader)
                for batch in itertools.islice(it, take):
                    out += zip(*(x.tolist() for x in batch), strict=True)
                states.append(loader.state_dict())
                del it
            return out, rank_states.join(states)

        whole, _ = read(2, None, None)
        begun, state = read(2, None, 2)
        rest, _ = read(1, state, None)
        assert sorted(begun + rest) == sorted(whole)


def test_shard_counts_ranks_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stoker.shard() == Shard(0, 1)
    be(1, 3, monkeypatch)
    assert stoker.shard() == (1, 3)
    for cls in (torch.utils.data.DataLoader, stoker.DataLoader):
        got = [x.tolist() for x in cls(Lines(12), batch_size=2, num_workers=2)]
        assert got == [[1, 7], [4, 10]], cls


# -- what cannot go on


class ByRank(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(int(__import__("os").environ["RANK"]), 12, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_does_not_ask_for_its_part_is_an_error(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, state = each_rank(streams(ByRank(), 1), 2, None, 1, monkeypatch)
    be(0, 1, monkeypatch)
    loader = streams(ByRank(), workers, "process")()
    loader.load_state_dict(state)
    words = "does not ask stoker.shard" if workers else "num_workers to 1 or more"
    with pytest.raises(StateError, match=words):
        list(loader)
    _, state_of_one = each_rank(streams(ByRank(), 1), 1, None, 1, monkeypatch)
    be(0, 2, monkeypatch)  # which has one part
    loader.load_state_dict(state_of_one)
    with pytest.raises(StateError, match=words):
        list(loader)
    be(1, 2, monkeypatch)  # as many ranks as before
    loader = streams(ByRank(), 1, "process")()
    loader.load_state_dict(state)
    assert [x.tolist() for x in loader] == [[5, 7], [9, 11]]


@pytest.mark.parametrize("shuffled", [False, True])
def test_parts_that_were_begun_without_workers(shuffled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their random state was that of the whole process: what was drawn from it cannot be drawn again elsewhere."""
    make = streams(Lines(18, shuffled), 0)
    seen, state = each_rank(make, 3, None, 1, monkeypatch)
    some, later = each_rank(make, 3, state, 1, monkeypatch)
    rest, _ = each_rank(make, 3, later, None, monkeypatch)
    assert sorted(seen + some + rest) == list(range(18))
    for method in ("process", "thread"):
        fewer = streams(Lines(18, shuffled), 2, method)
        if shuffled:
            with pytest.raises(StateError, match="draws random numbers, and the run began without workers"):
                each_rank(fewer, 2, state, None, monkeypatch)
            continue
        rest, _ = each_rank(fewer, 2, state, None, monkeypatch)
        assert sorted(seen + rest) == list(range(18))


def test_one_rank_s_state_is_not_enough_for_an_iterable_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    be(0, 2, monkeypatch)
    loader = streams(Lines(12), 1)()
    next(iter(loader))
    one = loader.state_dict()
    be(0, 3, monkeypatch)
    with pytest.raises(
        StateError, match=r"rank 0 of 2 .* there are 3 ranks now. Resuming needs the states of all ranks"
    ):
        loader.load_state_dict(one)
    be(1, 2, monkeypatch)
    with pytest.warns(StokerWarning, match="Rank 1 loaded the state dict of rank 0 with an iterable dataset"):
        loader.load_state_dict(one)
    assert [x.tolist() for x in loader] == [[5, 7], [9, 11]]
    loader = streams(StatefulLines(12), 1)()
    next(iter(loader))
    stateful = loader.state_dict()
    be(0, 2, monkeypatch)
    with pytest.raises(StateError, match="Load each rank's own state"):
        loader.load_state_dict(stateful)


def test_a_state_loaded_before_there_is_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no launcher says which rank this is."""
    _, state = each_rank(streams(Lines(12), 1), 1, None, 1, monkeypatch)
    for workers in (0, 1):
        be(0, 1, monkeypatch)
        loader = streams(Lines(12), workers, "process")()
        loader.load_state_dict(state)
        be(0, 2, monkeypatch)
        with pytest.raises(StateError, match="was rank 0 of 1 when it loaded the state dict and is now rank 0 of 2"):
            iter(loader)


def test_states_that_are_not_of_one_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make = streams(Lines(12), 1)
    be(0, 2, monkeypatch)
    loader = make()
    next(iter(loader))
    one = loader.state_dict()
    for states in ([one], [one, one], []):
        with pytest.raises(StateError, match="all_ranks"):
            make().load_state_dict(rank_states.join(states))
    for broken in ("[", 3, "null"):
        with pytest.raises(StateError):
            make().load_state_dict({"stoker": 3, "all_ranks": broken})
    _, whole = each_rank(make, 2, None, 1, monkeypatch)
    states = json.loads(whole["all_ranks"])
    states[1]["parts"] = states[0]["parts"]
    be(0, 1, monkeypatch)
    with pytest.raises(StateError, match="1 of the 2 parts"):
        make().load_state_dict(rank_states.join(states))
    be(0, 2, monkeypatch)
    all_ranks = stoker.AllRanks(make())
    with pytest.raises(StateError, match="first"):
        all_ranks.state_dict()
    with pytest.raises(UsageError, match=r"takes a stoker.DataLoader; a DataLoader has no"):
        stoker.AllRanks(torch.utils.data.DataLoader([1]))  # type: ignore[arg-type]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sampler_that_does_not_divide_among_ranks(shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        return stoker.DataLoader(range(12), batch_size=2, shuffle=shuffle)

    be(1, 4, monkeypatch)
    loader = make()
    it = iter(loader)
    start = loader.state_dict()
    next(it)
    state = loader.state_dict()
    for _ in it:
        pass
    end = loader.state_dict()
    be(0, 2, monkeypatch)
    again = make()
    again.load_state_dict(state)
    with pytest.raises(
        StateError, match=r"by 4 ranks and there are 2 now, but .*Sampler does not say how ranks divide"
    ):
        iter(again)
    for fine in (start, end):  # nothing of the epoch has been delivered
        again.load_state_dict(fine)
        assert len(list(again)) == 6


def distributed(n: int, state: Any = None, cls: Any = DistributedSampler, **more: Any) -> Any:
    loader = stoker.DataLoader(range(n), batch_size=2, sampler=cls(range(n), **more))
    if state is not None:
        loader.load_state_dict(state)
    return loader


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 50), st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.booleans(), st.booleans())
def test_padding(n: int, before: int, after: int, take: int, shuffle: bool, drop_last: bool) -> None:
    """Fewer samples than there are ranks come twice, or with ``drop_last`` not at all; all ranks get as many."""
    more = {"shuffle": shuffle, "drop_last": drop_last}
    seen: list[int] = []
    states = []
    for rank in range(before):
        loader = distributed(n, num_replicas=before, rank=rank, **more)
        seen += [i for batch in itertools.islice(loader, take) for i in batch.tolist()]
        states.append(loader.state_dict())
    if states[0]["finished"]:
        return
    counts = set()
    for rank in range(after):
        loader = distributed(n, rank_states.join(states), num_replicas=after, rank=rank, **more)
        got = [i for batch in loader for i in batch.tolist()]
        counts.add(len(got))
        seen += got
    assert len(counts) == 1
    padded, dropped = len(seen) - len(set(seen)), n - len(set(seen))
    most = max(before, after) - 1
    assert (padded, dropped <= most) == (0, True) if drop_last else (padded <= most, dropped) == (True, 0)


class OwnState(DistributedSampler[int]):
    """Has a state, and divides as torch does."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class InBlocks(DistributedSampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


def test_subclasses_of_the_distributed_sampler() -> None:
    for cls, fine in ((OwnState, True), (InBlocks, False)):
        loader = distributed(12, cls=cls, num_replicas=2, rank=0, shuffle=False)
        next(iter(loader))
        again = distributed(12, loader.state_dict(), cls=cls, num_replicas=3, rank=1, shuffle=False)
        if not fine:
            with pytest.raises(StateError, match="InBlocks divides an epoch among ranks in its own way"):
                iter(again)
            continue
        assert [x.tolist() for x in again] == [[5, 8], [11]]


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_rank_that_has_met_the_end_waits_for_the_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(rank: int) -> Any:
        be(rank, 2, monkeypatch)
        more = {"num_replicas": 2, "rank": rank, "shuffle": False}
        return distributed(12, **more) if kind == "map" else streams(Lines(12), 1)()

    states = []
    for rank in range(2):
        loader = make(rank)
        for _ in itertools.islice(loader, 3 if rank else None):
            pass
        states.append(loader.state_dict())
    assert [s["finished"] for s in states] == [True, False]
    for rank in range(2):
        loader = make(rank)
        loader.load_state_dict(rank_states.join(states))
        assert [len(list(loader)) for _ in range(2)] == [0, 3]


def test_ranks_that_were_not_at_the_same_batch() -> None:
    states = []
    for rank in range(2):
        loader = distributed(12, num_replicas=2, rank=rank)
        for _ in itertools.islice(loader, rank + 1):
            pass
        states.append(loader.state_dict())
    with pytest.raises(StateError, match=r"not at the same batch when they were saved \(they had 1 to 2\)"):
        distributed(12, rank_states.join(states), num_replicas=3, rank=0)


def test_a_sampler_over_all_samples_says_so_with_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that compute parts of one model read the same samples."""
    be(1, 4, monkeypatch)
    loader = distributed(8, num_replicas=1, rank=0, shuffle=False)
    next(iter(loader))
    state = loader.state_dict()
    be(0, 2, monkeypatch)
    again = distributed(8, state, num_replicas=1, rank=0, shuffle=False)
    assert [x.tolist() for x in again] == [[2, 3], [4, 5], [6, 7]]


def test_states_of_version_2_have_no_ranks() -> None:
    loader = stoker.DataLoader(range(8), batch_size=2, sampler=RandomSampler(range(8)))
    it = iter(loader)
    next(it)
    state = {**loader.state_dict(), "stoker": 2}
    for name in ("rank", "ranks", "division"):
        del state[name]
    rest = [x.tolist() for x in it]
    loader.load_state_dict(state)
    assert [x.tolist() for x in loader] == rest
