"""Workers that come and go within an epoch: the same batches in the same order, whoever runs them and how many."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

import stoker
from stoker.core.errors import BudgetError, UsageError, WorkerDiedError
from stoker.core.metrics import LoaderMetrics
from stoker.core.options import Budget, Knobs, parse_bytes
from stoker.loader.auto.controller import BURST, PER_MINUTE, Controller
from stoker.loader.loader_state import state_of
from stoker.loader.scheduler import Scheduler
from tests.helpers import children_left, own_generator

SEED = int(os.environ.get("STOKER_SEED", "0"))
METHODS = ["process", "thread"]
WAIT_S = 60


class Drawn(Dataset):
    """Index and random numbers, from generators that threads and processes may both use."""

    def __init__(self, n: int = 240) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(i)]), torch.rand(3, generator=own_generator())])


def auto(dataset: Any, workers: int, **kw: Any) -> Any:
    """A loader whose count is free, and known: nothing is measured."""
    loader = stoker.DataLoader(dataset, num_workers="auto", **kw)
    loader.resize(workers)
    return loader


def epoch(loader: Any, changes: dict[int, int] | None = None) -> torch.Tensor:
    torch.manual_seed(5)
    out = []
    for i, batch in enumerate(loader):
        if changes and i in changes:
            loader.resize(changes[i])
        out.append(batch.clone())
    return torch.cat(out)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.few(1)
def test_resizing_changes_no_bit(method: str, persistent: bool) -> None:
    print(f"STOKER_SEED={SEED}")
    r = random.Random(SEED)
    kw = {"batch_size": 3, "shuffle": True, "worker_method": method, "persistent_workers": persistent}
    fixed = epoch(auto(Drawn(), 2, **kw))
    for _ in range(2):
        loader = auto(Drawn(), r.randint(1, 4), **kw)
        changes = {r.randrange(80): r.randint(1, 5) for _ in range(r.randint(1, 8))}
        print(int(loader.num_workers), changes)
        assert torch.equal(epoch(loader, changes), fixed)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_any_thread_may_resize(method: str) -> None:
    """As often as it likes, while the consumer takes batches: none is lost, none changes."""
    print(f"STOKER_SEED={SEED}")
    kw = {"batch_size": 3, "shuffle": True, "worker_method": method, "timeout": WAIT_S}
    fixed = epoch(auto(Drawn(1200), 2, **kw))
    for seed in (SEED,):
        loader, over, r = auto(Drawn(1200), 2, **kw), threading.Event(), random.Random(seed)

        def change(loader: Any = loader, over: threading.Event = over, r: random.Random = r) -> None:
            while not over.is_set():
                loader.resize(r.randint(1, 3))

        other = threading.Thread(target=change)
        other.start()
        try:
            got = epoch(loader)
        finally:
            over.set()
            other.join(WAIT_S)
        assert torch.equal(got, fixed)
    assert not children_left()


@pytest.mark.slow
def test_a_signal_may_resize() -> None:
    """Also in the middle of next, where a lock that its own thread holds would never come free."""
    print(f"STOKER_SEED={SEED}")
    r = random.Random(SEED)
    fixed = epoch(auto(Drawn(1200), 2, batch_size=3, shuffle=True))
    loader = auto(Drawn(1200), 2, batch_size=3, shuffle=True, timeout=WAIT_S)
    came = []

    def change(*_: Any) -> None:
        came.append(r.randint(1, 3))
        loader.resize(came[-1])

    before = signal.signal(signal.SIGALRM, change)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        got = epoch(loader)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert came
    assert torch.equal(got, fixed)


class Resizing(Drawn):
    loader: Any = None

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 30:
            self.loader.resize(3)
        return super().__getitem__(i)


def test_a_worker_process_resizes_nothing() -> None:
    """It has a copy of the loader, and must not write to the parent's pipes."""
    data = Resizing()
    data.loader = loader = auto(data, 1, batch_size=3, timeout=WAIT_S)
    loader.resize(1)  # and not by "auto"
    assert [int(b[0, 0]) for b in loader] == list(range(0, 240, 3))
    assert int(loader.num_workers) == 1


def test_a_worker_thread_may_resize() -> None:
    data = Resizing()
    data.loader = loader = auto(data, 1, batch_size=3, timeout=WAIT_S, worker_method="thread")
    assert [int(b[0, 0]) for b in loader] == list(range(0, 240, 3))
    assert int(loader.num_workers) == 3


class Growing(Sampler[int]):
    """Wants a worker more in the middle of being asked for an index."""

    loader: Any = None

    def __iter__(self) -> Iterator[int]:
        for i in range(240):
            if i == 120:
                self.loader.resize(3)
            yield i


def test_a_sampler_may_resize() -> None:
    sampler = Growing()
    sampler.loader = loader = auto(Drawn(), 1, batch_size=3, sampler=sampler, timeout=WAIT_S)
    it = iter(loader)
    firsts = []
    most = 0
    for batch in it:
        firsts.append(int(batch[0, 0]))
        most = max(most, len(it._workers))
    assert firsts == list(range(0, 240, 3))
    assert most > 1


def test_the_kind_of_workers_changes_no_bit() -> None:
    a, b = (epoch(auto(Drawn(), 2, batch_size=3, shuffle=True, worker_method=m)) for m in METHODS)
    assert torch.equal(a, b)


@pytest.mark.slow
def test_resizing_under_spawn() -> None:
    fixed = epoch(auto(Drawn(60), 1, batch_size=3, shuffle=True))
    loader = auto(Drawn(60), 1, batch_size=3, shuffle=True, multiprocessing_context="spawn")
    assert torch.equal(epoch(loader, {2: 3, 10: 1}), fixed)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_workers_come_and_go(method: str) -> None:
    loader = auto(Drawn(16000), 1, batch_size=2, worker_method=method)
    it = iter(loader)
    next(it)
    loader.resize(4)
    taken = 1
    while len(it._workers) < 4:  # one at a time, so that none of them is a pause
        next(it)
        taken += 1
    gone = list(it._workers)[2:]
    loader.resize(2)
    for worker in gone:  # each finishes the task it has, and goes
        worker.join(WAIT_S)
        assert not worker.is_alive()
    assert all(torch.equal(batch[:, 0], torch.tensor([2.0 * i, 2.0 * i + 1])) for i, batch in enumerate(it, taken))
    assert int(loader.num_workers) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_workers_that_stay_serve_every_epoch(method: str) -> None:
    """Also one that begins while tasks of the last are still up."""
    loader = auto(Drawn(300), 2, batch_size=3, worker_method=method, persistent_workers=True, timeout=WAIT_S)
    for left in (100, 3, 100, 1, 100):
        firsts = [int(batch[0, 0]) for batch, _ in zip(loader, range(left), strict=False)]
        assert firsts == list(range(0, 3 * left, 3))
        loader.resize(1 + left % 3)


class Counted(Drawn):
    def __getitem__(self, i: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        return torch.tensor([info.id, info.num_workers])


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_workers_know_how_many_they_are(method: str) -> None:
    loader = auto(Counted(600), 2, batch_size=1, worker_method=method)
    it = iter(loader)
    next(it)
    loader.resize(3)
    rest = torch.cat(list(it))[60:]  # what was in flight when it was resized may say otherwise
    assert set(rest[:, 1].tolist()) == {3}
    assert set(rest[:, 0].tolist()) <= {0, 1, 2}


def test_many_resizes_leave_no_descriptor_and_no_process() -> None:
    loader = auto(Drawn(3000), 1, batch_size=1)
    it = iter(loader)
    next(it)
    before = len(os.listdir("/proc/self/fd"))
    for k in range(40):
        loader.resize(1 + k % 3)
        next(it)
    loader.resize(1)
    for worker in list(it._workers):
        if worker is not it._workers[0]:
            worker.join(WAIT_S)
    for _ in range(60):
        next(it)
    assert len(it._workers) <= 3
    assert len(os.listdir("/proc/self/fd")) <= before + 24
    del it
    assert not children_left()


class Held(Dataset):
    """Sample 0 waits until sample 2 has been begun, which torch gives to the same one of two workers."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> int:
        if i == 0:
            assert self.event.wait(WAIT_S)
        if i == 2:
            self.event.set()
        return i


def test_a_slow_task_holds_up_nobody() -> None:
    loader = auto(Held(multiprocessing.Event()), 2, batch_size=1)
    assert [int(b) for b in loader] == list(range(20))


class Large(Dataset):
    def __init__(self, floats: int = 100_000) -> None:
        self.floats = floats

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((self.floats,), float(i))


def test_index_lists_of_any_length_reach_whoever_is_free() -> None:
    loader = auto(range(20_000), 3, batch_size=5000, shuffle=True)
    for _ in range(2):
        assert torch.cat(list(loader)).sort().values.tolist() == list(range(20_000))


class Deadly(Drawn):
    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([i])


def test_a_death_costs_one_task_and_the_others_go_on() -> None:
    loader = auto(Deadly(100), 3, batch_size=5)
    it = iter(loader)
    got, deaths = [], 0
    while True:
        try:
            got += next(it)[:, 0].tolist()
        except StopIteration:
            break
        except RuntimeError:
            deaths += 1
            assert deaths < 5
    assert deaths
    assert sorted(set(range(100)) - set(got)) == [50, 51, 52, 53, 54]
    assert got == sorted(got)


def test_without_workers_left_an_epoch_ends() -> None:
    it = iter(auto(Deadly(100), 1, batch_size=50))
    next(it)
    with pytest.raises((RuntimeError, WorkerDiedError)):
        next(it)
    with pytest.raises((StopIteration, RuntimeError)):
        next(it)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True, None, np.float32(2), torch.tensor(1.5)], ids=repr)
def test_resize_refuses_what_is_no_count(wrong: Any) -> None:
    loader = auto(Drawn(), 1)
    with pytest.raises(UsageError, match=r"resize\(\) needs a positive integer"):
        loader.resize(wrong)


@pytest.mark.parametrize("count", [np.int64(2), torch.tensor(2)], ids=repr)
def test_resize_takes_whole_numbers_of_any_kind(count: Any) -> None:
    loader = auto(Drawn(), 1)
    loader.resize(count)
    assert int(loader.num_workers) == 2


@pytest.mark.parametrize("word", ["Auto", "AUTO", " auto"])
def test_a_count_is_a_number_or_auto(word: str) -> None:
    with pytest.raises(UsageError, match=f"num_workers must be .*, not {word!r}"):
        stoker.DataLoader(Drawn(), num_workers=word)


def test_resize_refuses_more_than_fit() -> None:
    with pytest.raises(BudgetError, match=r"resize\(1000000\): at most \d+ workers fit here: "):
        auto(Drawn(), 1).resize(1_000_000)


@pytest.mark.slow
def test_torchs_seeds_wait_for_the_next_epoch() -> None:
    loader = stoker.DataLoader(Drawn(60), batch_size=3, num_workers=1)
    it = iter(loader)
    next(it)
    loader.resize(3)
    assert len(it._workers) == 1
    torch.manual_seed(5)
    theirs = torch.cat(list(torch.utils.data.DataLoader(Drawn(60), batch_size=3, num_workers=3)))
    assert torch.equal(epoch(loader), theirs)
    with pytest.raises(UsageError, match="cannot change within an epoch"):
        it.resize(2)


class Sharded(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(info.id, 12, info.num_workers))


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [2, "auto"])
@pytest.mark.parametrize("persistent", [False, True])
def test_shards_wait_for_the_next_epoch(workers: Any, persistent: bool) -> None:
    loader = stoker.DataLoader(Sharded(), batch_size=2, num_workers=workers, persistent_workers=persistent)
    it = iter(loader)
    first = [next(it)]
    loader.resize(3)
    rest = torch.cat(first + list(it)).tolist()
    assert sorted(rest) == list(range(12))
    again = iter(loader)
    assert len(again._workers) == 3
    assert sorted(torch.cat(list(again)).tolist()) == list(range(12))


def test_a_loader_without_workers_gets_some() -> None:
    loader = stoker.DataLoader(Drawn(), batch_size=3)
    loader.resize(2)
    assert loader.prefetch_factor == 2
    assert len(iter(loader)._workers) == 2


# ----------------------------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize("workers", [1, 4, "auto"])
def test_a_budget_too_small_for_a_batch_has_both_numbers(workers: Any) -> None:
    loader = stoker.DataLoader(Large(), batch_size=4, num_workers=workers, budget="1MB")
    with pytest.raises(BudgetError, match=r"one batch takes 1,6\d\d,\d\d\d bytes, but the budget is 1,000,000"):
        next(iter(loader))


def separate(samples: list[torch.Tensor]) -> list[Any]:
    return [{"x": sample.numpy()} for sample in samples]


def looped(samples: list[torch.Tensor]) -> list[Any]:
    batch: list[Any] = list(samples)
    batch.append(batch)
    return batch


@pytest.mark.few(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("collate", [None, separate])
@pytest.mark.parametrize("budget", [1, "1MB"])
def test_so_has_one_for_either_kind_of_workers(method: str, collate: Any, budget: Any) -> None:
    loader = stoker.DataLoader(
        Large(), batch_size=4, num_workers=2, budget=budget, worker_method=method, collate_fn=collate
    )
    with pytest.raises(BudgetError, match=r"one batch takes 1,6\d\d,\d\d\d bytes, but the budget is 1"):
        next(iter(loader))


def test_a_batch_that_holds_itself_weighs_nothing() -> None:
    loader = stoker.DataLoader(Drawn(40), 4, num_workers=2, budget="1MB", worker_method="thread", collate_fn=looped)
    assert all(batch[4] is batch and int(batch[0][0]) == 4 * i for i, batch in enumerate(loader))


class Asked(Dataset):
    """Counts how many samples it was asked for."""

    asked = 0
    lock = threading.Lock()

    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> torch.Tensor:
        with self.lock:
            Asked.asked += 1
        return torch.zeros(100_000)


def test_threads_make_no_more_ahead_than_fits() -> None:
    loader = stoker.DataLoader(
        Asked(), 4, num_workers=2, budget="4MB", worker_method="thread", collate_fn=separate, prefetch_factor=8
    )
    it = iter(loader)
    for k in range(1, 20):
        next(it)
        assert Asked.asked <= 4 * (k + 3)
    del it


def test_a_budget_large_enough_is_no_error() -> None:
    loader = stoker.DataLoader(Large(), batch_size=4, num_workers=4, budget="2MB", prefetch_factor=8)
    assert [int(b[0, 0]) for b, _ in zip(loader, range(20), strict=False)] == list(range(0, 80, 4))


@pytest.mark.parametrize("wrong", ["", "4 parsecs", 0, -5, 1.5, 0.0, True, "MB"])
def test_a_budget_that_is_none(wrong: Any) -> None:
    with pytest.raises(UsageError, match="budget must be"):
        stoker.DataLoader(Drawn(), budget=wrong)


def test_amounts_of_memory() -> None:
    assert parse_bytes("4GB", 0) == 4 * 10**9
    assert parse_bytes(" 1.5 MiB", 0) == 3 << 19
    assert parse_bytes(4096, 0) == 4096
    assert parse_bytes(0.25, 1000) == 250


class Still:
    """A pool that keeps what it is given until it is asked."""

    ahead = 0

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.tasks, self.most, self.workers = nbytes, [], 0, 1

    def submit(self, worker: Any, task: Any) -> None:
        self.tasks.append(task)
        self.most = max(self.most, len(self.tasks))

    def receive(self, timeout: Any, worker: Any = None) -> Any:
        return Done(self.tasks.pop(0), self.nbytes)

    def resize(self, n: int) -> None:
        self.workers = n

    def alive(self) -> int:
        return self.workers

    def finish(self) -> None: ...
    def retire(self, worker: int) -> None: ...
    def resume(self, epoch: int, seed: Any) -> None: ...
    def close(self) -> None: ...


class Done:
    worker = epoch = 0
    ended = False
    times = (0, 0, 0, 0)

    def __init__(self, task: Any, nbytes: int) -> None:
        self.task, self.nbytes = task.number, nbytes

    def take(self) -> int:
        return self.task

    def drop(self) -> None: ...


def scheduler(pool: Still, budget: Budget, **knobs: Any) -> Scheduler:
    s = Scheduler(pool, Knobs(shared=True, task_seeds=True, **knobs), LoaderMetrics(), budget)
    s.begin(iter(range(100)).__next__)
    return s


def rest(s: Scheduler) -> list[int]:
    out = []
    while True:
        try:
            out.append(s.next())
        except StopIteration:
            return out


def test_bytes_in_flight_stay_within_the_budget() -> None:
    pool = Still(1000)
    s = scheduler(pool, Budget(0, flight_bytes=3500, strict=True), num_workers=4, prefetch_factor=4)
    assert len(pool.tasks) == 1  # until it is known how large a batch is
    assert rest(s) == list(range(100))
    assert pool.most == 3


def test_what_is_made_ahead_for_stragglers_is_small() -> None:
    large, small = Still(1000), Still(10)
    for pool in (large, small):
        s = scheduler(pool, Budget(0, flight_bytes=16_000), num_workers=2, prefetch_factor=2, ahead=8)
        assert rest(s) == list(range(100))
    assert large.most == 4
    assert small.most == 16


def test_credits_follow_the_count() -> None:
    pool = Still(1)
    s = scheduler(pool, Budget(0), num_workers=2, prefetch_factor=2)
    assert len(pool.tasks) == 4
    s.resize(5)
    assert len(pool.tasks) == 10
    s.resize(1)
    assert rest(s) == list(range(100))
    pool.tasks.clear()
    s.begin(iter(range(100)).__next__)
    assert len(pool.tasks) == 2


# ------------------------------------------------------------------------------------------------------- controller


class World:
    """A consumer and workers in made-up time."""

    def __init__(self, batch_s: float, step_s: float, cores: int) -> None:
        self.batch_s, self.step_s, self.cores, self.now, self.waited = batch_s, step_s, cores, 0.0, 0.0
        self.decisions: list[Any] = []

    def run(self, c: Controller, batches: int, noise: random.Random | None = None) -> None:
        for _ in range(batches):
            make = self.batch_s / min(c.workers, self.cores)
            if noise is not None:
                make *= self.mood
            self.now += max(make, self.step_s)
            self.waited += max(0.0, make - self.step_s)
            decision = c.step(int(self.waited * 1e9))
            if decision is not None:
                self.decisions.append(decision)

    mood = 1.0


def controller(world: World, workers: int, most: int = 8, **kw: Any) -> Controller:
    return Controller(workers, lambda: most, clock=lambda: int(world.now * 1e9), **kw)


def test_workers_are_added_while_the_consumer_waits_and_it_pays() -> None:
    world = World(batch_s=0.040, step_s=0.010, cores=8)
    c = controller(world, 1)
    world.run(c, 3000)
    assert c.workers == 4


def test_a_worker_that_does_not_pay_goes_again_and_is_not_tried_twice() -> None:
    world = World(batch_s=0.040, step_s=0.001, cores=2)
    c = controller(world, 1)
    seen = []
    for _ in range(200):
        world.run(c, 50)
        seen.append(c.workers)
    assert seen[-1] == 2
    assert seen.count(3) < 20


def test_idle_workers_go() -> None:
    world = World(batch_s=0.010, step_s=0.020, cores=8)
    c = controller(world, 6)
    world.run(c, 5000)
    assert c.workers == 1


def test_a_pause_of_the_consumer_is_no_change_of_the_load() -> None:
    world = World(batch_s=0.040, step_s=0.001, cores=2)
    c = controller(world, 2)
    world.run(c, 1500)
    settled = len(world.decisions)
    for _ in range(20):
        world.now += 5.0  # an evaluation, in which all that may be in flight is made
        for _ in range(c.workers * 8):
            assert c.step(int(world.waited * 1e9)) is None
        world.run(c, 60)
    # A trial or two of what did not pay before, with longer and longer rests; not one after each pause.
    assert len(world.decisions) - settled <= 6, world.decisions


def test_a_changed_load_wakes_it() -> None:
    world = World(batch_s=0.010, step_s=0.020, cores=8)
    c = controller(world, 2)
    world.run(c, 3000)
    assert c.workers == 1
    world.batch_s = 0.1  # a slower disk
    world.run(c, 6000)
    assert c.workers == 5


def test_far_away_is_reached_in_few_steps() -> None:
    world = World(batch_s=0.5, step_s=0.0001, cores=24)
    c = controller(world, 1, most=32)
    world.run(c, 600)
    assert 20 <= c.workers <= 32
    assert len([d for d in world.decisions if d.workers > 1]) < 10
    near = World(batch_s=0.1, step_s=0.0001, cores=5)
    c = controller(near, 1, most=32)
    near.run(c, 2000)
    assert c.workers == 5  # eight made as much


def test_a_restless_machine_moves_nothing_to_and_fro() -> None:
    """Ten minutes in which the rate jumps by a factor of up to three every few seconds."""
    print(f"STOKER_SEED={SEED}")
    r = random.Random(SEED)
    world = World(batch_s=0.020, step_s=0.0001, cores=2)
    c = controller(world, 1, most=16)
    times: list[int] = []
    while world.now < 600:
        world.mood = r.uniform(0.6, 1.8)
        had = len(world.decisions)
        world.run(c, r.randrange(50, 400), noise=r)
        times += [int(world.now // 60)] * (len(world.decisions) - had)
    assert 2 < len(world.decisions) <= BURST + 10 * PER_MINUTE
    assert max(times.count(minute) for minute in times) <= BURST + PER_MINUTE


def test_the_number_stays_within_its_bounds() -> None:
    """Loads that change at any moment."""
    print(f"STOKER_SEED={SEED}")
    r = random.Random(SEED)
    for _ in range(40):
        world = World(batch_s=r.uniform(0.002, 0.2), step_s=r.uniform(0.0001, 0.05), cores=r.randint(1, 8))
        most = r.randint(1, 12)
        c = controller(world, r.randint(1, most), most=most)
        for _ in range(60):
            world.run(c, r.randrange(10, 120), noise=r)
            assert 1 <= c.workers <= most
            if r.random() < 0.2:
                world.mood = r.uniform(0.3, 2.0)
            if r.random() < 0.1:
                world.batch_s, world.step_s = r.uniform(0.002, 0.2), r.uniform(0.0001, 0.05)
            if r.random() < 0.05:
                c.begin(int(world.waited * 1e9))


def test_the_count_moves_in_a_real_epoch() -> None:
    """Samples that wait: more workers pay at once, and no batch changes."""
    loader = stoker.DataLoader(Sleepy(), batch_size=1, num_workers="auto")
    loader.resize(1)
    state_of(loader).manual_workers = False
    out = []
    for batch in loader:
        out.append(int(batch))
        if int(loader.num_workers) > 1 and len(out) > 100:
            break
    assert out == list(range(len(out)))
    assert loader.decisions[0] == "resize(1)"
    assert "1 -> 2 workers: the consumer waits" in loader.decisions[1]


class Moody(Dataset):
    """Comes from as far away as a number in shared memory says, now."""

    def __init__(self) -> None:
        self.seconds = torch.full((1,), 0.0005, dtype=torch.float64).share_memory_()

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, i: int) -> int:
        time.sleep(float(self.seconds))
        return i


@pytest.mark.slow
def test_a_load_that_changes_in_mid_run_is_followed() -> None:
    """A disk gets 80 times slower in the middle of an epoch: workers come, and no batch changes."""
    dataset = Moody()
    loader = stoker.DataLoader(dataset, batch_size=1, num_workers="auto")
    loader.resize(2)
    state_of(loader).manual_workers = False
    deadline = time.monotonic() + 60
    for i, batch in enumerate(loader):
        assert int(batch) == i
        time.sleep(0.005)  # the consumer's own step; to be woken takes a busy machine a per cent of 2 ms
        workers = int(loader.num_workers)
        if workers == 1:  # they had nothing to do
            dataset.seconds.fill_(0.04)
        if float(dataset.seconds) > 0.01 and workers >= 6:
            break
        assert time.monotonic() < deadline, loader.decisions
    assert len(loader.decisions) <= 1 + BURST


class Sleepy(Dataset):
    def __len__(self) -> int:
        return 3000

    def __getitem__(self, i: int) -> int:
        time.sleep(0.005)  # what is loaded comes from far away
        return i
