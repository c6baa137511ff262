"""Workers that stay for the next epoch: the batches are those of workers that are started for each epoch."""

from __future__ import annotations

import copy
import os
import random
import signal
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate, get_worker_info

from stoker.core import reclaim
from stoker.loader.loader_state import state_of
from stoker.loader.pool_iterator import PoolIter
from stoker.tuning import apply, kept_epochs
from stoker.workers import idle

from .conftest import put_behind_apply
from .test_late_plan import slow

SAMPLES, BATCH, EPOCHS = 24, 4, 6
GAIN = [1.0]  # of the module, read by samples
RNG = np.random.default_rng(3)  # of the module, drawn from by samples


class Loader(DataLoader[Any]):
    """What ``--apply`` is put behind."""


class Jitter:
    strength = 1.0

    def __init__(self) -> None:
        self.by = {"torch": 1.0}

    def __call__(self, x: Any) -> Any:
        drawn = torch.rand(1).item() * self.by["torch"] + random.gauss(0, 1) + np.random.randn()
        return x * GAIN[0] + drawn * self.strength


class Samples(Dataset[Any]):
    """A slow part, and a random one that reads settings of the script's. ``more``: an attribute of this object's."""

    def __init__(self, **more: Any) -> None:
        self.flip, self.jitter, self.weights = 0.5, Jitter(), np.ones(SAMPLES)
        vars(self).update(more)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        if random.random() < self.flip:
            x = x[::-1].copy()
        return torch.from_numpy(self.jitter(x) * self.weights[i]), i


class WithGenerator(Samples):
    def __getitem__(self, i: int) -> Any:
        x, i = super().__getitem__(i)
        return x + self.rng.random(), i  # type: ignore[attr-defined]


class OfModule(Samples):
    def __getitem__(self, i: int) -> Any:
        x, i = super().__getitem__(i)
        return x + RNG.random(), i


class Informed(Samples):
    def __getitem__(self, i: int) -> Any:
        x, i = super().__getitem__(i)
        info = get_worker_info()
        assert info is not None
        return x, (info.id, info.num_workers, info.seed)


class Sets(Samples):
    """Keeps something of its own in each worker, from the first sample on."""

    first: Any = None

    def __getitem__(self, i: int) -> Any:
        x, i = super().__getitem__(i)
        if self.first is None:
            self.first = random.random()
        return x + self.first, i


class Fails(Samples):
    def __getitem__(self, i: int) -> Any:
        if i == self.bad and GAIN[0] > 1:  # type: ignore[attr-defined]
            raise ValueError("on purpose")
        return super().__getitem__(i)


def seed_all(worker: int) -> None:
    seed = torch.initial_seed() % 2**32 + 100 * worker
    np.random.seed(seed)
    random.seed(seed)


def seed_own(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.rng = np.random.default_rng(info.seed)  # type: ignore[attr-defined]


seen: list[int] = []


def by_default(samples: list[Any], held: list[Any] = []) -> Any:  # noqa: B006
    held.extend(samples)
    return default_collate([x for x, _ in samples]), len(held), random.random()


def collate(samples: list[Any]) -> Any:
    seen.append(len(samples))
    return default_collate([x for x, _ in samples]), len(seen), random.random()


def rows(samples: list[Any]) -> Any:
    return default_collate([x for x, _ in samples]), random.random()


Change = Callable[[Any, Any, int, int], None]


def at(epoch: int, batch: int, change: Callable[[Any, Any], Any]) -> Change:
    """Changes something at a batch of an epoch; batch -1: before the epoch."""

    def act(data: Any, loader: Any, e: int, k: int) -> None:
        if (e, k) == (epoch, batch):
            change(data, loader)

    return act


def nothing(data: Any, loader: Any, e: int, k: int) -> None:
    pass


def reseed(data: Any, loader: Any, e: int, k: int) -> None:
    if k == -1:
        torch.manual_seed(0)


def draw(data: Any, loader: Any, e: int, k: int) -> None:
    if k == 2:
        (getattr(data, "rng", None) or RNG).random()


def feed_back(data: Any, loader: Any, e: int, k: int) -> None:
    if k >= 0:
        data.weights[k] += 0.1


class Left(Exception):
    """An epoch is left early."""


def leave(data: Any, loader: Any, e: int, k: int) -> None:
    if k == 3 and e == 3:
        raise Left


EPOCH = [0]  # of the module, read by ``worker_init_fn``


def seed_epoch(worker: int) -> None:
    np.random.seed(1000 * EPOCH[0] + worker)


def seed_or_fail(worker: int) -> None:
    assert EPOCH[0] < 2, "on purpose"
    np.random.seed(worker)


def count_epochs(data: Any, loader: Any, e: int, k: int) -> None:
    EPOCH[0] = e


def by_home(samples: list[Any]) -> Any:
    return default_collate([x for x, _ in samples]), os.environ.get("KEPT"), random.random()


class Resets(Sampler[Any]):
    """Changes the dataset before workers start."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __iter__(self) -> Any:
        self.data.flip = 0.25 if self.data.flip == 0.5 else 0.5
        return iter([list(range(k, k + BATCH)) for k in range(0, SAMPLES, BATCH)])


def other_collate(data: Any, loader: Any) -> None:
    loader.collate_fn = rows


CASES: dict[str, tuple[Callable[[], Any], Change, dict[str, Any], list[int]]] = {
    # the dataset, what the script does, how the loader is made, and workers started for each epoch from the second on
    "nothing changes": (Samples, nothing, {}, [0, 0, 0, 0, 0]),
    "the same seed in each epoch": (Samples, reseed, {}, [0, 0, 0, 0, 0]),
    "an attribute": (Samples, at(3, -1, lambda d, _: setattr(d, "flip", 0.9)), {}, [0, 0, 2, 0, 0]),
    "within an epoch": (Samples, at(3, 2, lambda d, _: setattr(d, "flip", 0.9)), {}, [0, 0, 0, 2, 0]),
    "within an epoch, deeper": (Samples, at(3, 2, lambda d, _: d.jitter.by.update(torch=9.0)), {}, [0, 0, 0, 2, 0]),
    "a transform": (Samples, at(3, 1, lambda d, _: setattr(d, "jitter", Jitter())), {}, []),
    "a class": (Samples, at(3, 1, lambda *_: setattr(Jitter, "strength", 2.0)), {}, [0, 0, 0, 2, 0]),
    "a global": (Samples, at(3, 1, lambda *_: GAIN.__setitem__(0, 2.0)), {}, [0, 0, 0, 2, 0]),
    "an array after each batch": (Samples, feed_back, {}, [2, 2, 2, 2, 2]),
    "a generator": (lambda: WithGenerator(rng=np.random.default_rng(5)), nothing, {}, [0, 0, 0, 0, 0]),
    "a generator that the script uses": (lambda: WithGenerator(rng=np.random.default_rng(5)), draw, {}, []),
    "a generator of the module": (OfModule, nothing, {}, [0, 0, 0, 0, 0]),
    "a generator of the module that the script uses": (OfModule, draw, {}, []),
    "seeds": (Samples, nothing, {"worker_init_fn": seed_all}, [0, 0, 0, 0, 0]),
    "a generator made in workers": (lambda: WithGenerator(rng=None), nothing, {"worker_init_fn": seed_own}, []),
    "a seed that a global decides": (Samples, count_epochs, {"worker_init_fn": seed_epoch}, [2, 2, 2, 2, 2]),
    "an error of worker_init_fn": (Samples, count_epochs, {"worker_init_fn": seed_or_fail}, []),
    "the environment": (
        Samples,
        at(3, -1, lambda *_: os.environ.__setitem__("KEPT", "1")),
        {"collate_fn": by_home},
        [],
    ),
    "a sampler that changes the dataset": (Samples, nothing, {"batch_sampler": Resets, "batch_size": 1}, [2] * 5),
    "who the worker is": (Informed, nothing, {}, []),
    "what samples set": (Sets, nothing, {}, [2, 2, 2, 2, 2]),
    "what collate_fn changes": (Samples, nothing, {"collate_fn": collate}, [2, 2, 2, 2, 2]),
    "what a default of collate_fn holds": (Samples, nothing, {"collate_fn": by_default}, [2, 2, 2, 2, 2]),
    "a collate_fn": (Samples, nothing, {"collate_fn": rows}, [0, 0, 0, 0, 0]),
    "another collate_fn": (Samples, at(3, -1, other_collate), {}, [0, 0, 2, 0, 0]),
    "an epoch that is left early": (Samples, leave, {}, [0, 0, 0, 2, 0]),
    "a subset": (lambda: Subset(Samples(), list(range(3, SAMPLES))), nothing, {}, [0, 0, 0, 0, 0]),
    "a subset that changes": (
        lambda: Subset(Samples(), list(range(3, SAMPLES))),
        at(3, 2, lambda d, _: d.indices.__setitem__(0, 20)),
        {},
        [0, 0, 0, 2, 0],
    ),
    "a file that is open": (lambda: Samples(file=open(__file__, "rb")), nothing, {}, [2, 2, 2, 2, 2]),
    "persistent workers": (Samples, nothing, {"persistent_workers": True}, [0, 0, 0, 0, 0]),
    "an error": (
        lambda: Fails(bad=7),
        at(2, -1, lambda *_: GAIN.__setitem__(0, 2.0)),
        {},
        [],
    ),
}
started = [0]
os.register_at_fork(after_in_parent=lambda: started.__setitem__(0, started[0] + 1))


def run(cls: type[DataLoader[Any]], make: Callable[[], Any], act: Change, how: dict[str, Any]) -> Any:
    """Digests of the batches of some epochs, with draws of the script's own, and the workers started for each."""
    global RNG
    RNG = np.random.default_rng(3)
    GAIN[0], Jitter.strength = 1.0, 1.0
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    seen.clear()
    os.environ.pop("KEPT", None)
    data = make()
    out, forks = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = how.get("batch_sampler")
        order = {"batch_sampler": own(data), "shuffle": False} if own else {"shuffle": True}
        loader = cls(data, **{"batch_size": BATCH, "num_workers": 2, **how, **order})
        for epoch in range(EPOCHS):
            act(data, loader, epoch, -1)
            before = started[0]
            it = iter(loader)
            forks.append(started[0] - before)
            try:
                for k, batch in enumerate(it):
                    out.append((repr(batch[1:]), batch[0].numpy().tobytes(), random.random(), float(torch.rand(()))))
                    act(data, loader, epoch, k)
            except Left:
                pass
            except (ValueError, AssertionError) as e:
                out.append((str(e).splitlines()[0], b"", 0.0, 0.0))
            del it
    return out, forks


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(apply, "first_guess", lambda loader: (2, "as it has"))
    for name in ("START_S", "KEPT_S"):
        monkeypatch.setattr(kept_epochs, name, 60.0)  # comparing may take any time here
    monkeypatch.setattr(idle, "EXPIRES_S", 60.0)  # workers inherit it
    return put_behind_apply(Loader, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_batches_are_those_of_new_workers(name: str, applied: dict[str, Any]) -> None:
    make, act, how, forks = CASES[name]
    found, started_for = run(Loader, make, act, how)
    wanted, _ = run(DataLoader, make, act, how)
    assert [x[:1] for x in found] == [x[:1] for x in wanted]
    assert found == wanted
    if forks:
        assert started_for[1:] == forks, applied


def waiting_loader() -> Loader:
    """One whose workers wait for the next epoch."""
    loader = Loader(Samples(), batch_size=BATCH, num_workers=2)
    for _ in range(2):
        assert len(list(loader)) == SAMPLES // BATCH
    assert state_of(loader).kept is not None
    return loader


def pids(loader: Loader) -> list[int]:
    kept = state_of(loader).kept
    assert kept is not None
    return [p.pid for p in kept.workers.processes if p.pid is not None]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_they_end_with_the_loader(applied: dict[str, Any]) -> None:
    loader = waiting_loader()
    waiting = pids(loader)
    assert len(waiting) == 2
    assert not any(map(is_gone, waiting))
    apply._datasets.clear()
    apply._entries.clear()
    del loader
    assert all(map(is_gone, waiting))


def test_they_end_where_memory_is_short(applied: dict[str, Any]) -> None:
    loader = waiting_loader()
    waiting = pids(loader)
    reclaim.give_back("a test")
    assert all(map(is_gone, waiting))
    assert len(list(loader)) == SAMPLES // BATCH


def test_where_one_was_killed_others_are_started(applied: dict[str, Any]) -> None:
    loader = waiting_loader()
    killed, other = pids(loader)
    os.kill(killed, signal.SIGKILL)
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    assert len(list(loader)) == SAMPLES // BATCH
    assert is_gone(other)


def test_two_iterators_at_once(applied: dict[str, Any]) -> None:
    loader = waiting_loader()
    one, two = iter(loader), iter(loader)
    for (_, i), (_, j) in zip(one, two, strict=True):
        assert torch.equal(i, j)
    kept = state_of(loader).kept
    assert kept is not None
    assert len(list(loader)) == SAMPLES // BATCH


def test_a_copy_of_the_loader_has_workers_of_its_own(applied: dict[str, Any]) -> None:
    loader = waiting_loader()
    other = copy.copy(loader)
    assert state_of(other).kept is None
    assert len(list(other)) == len(list(loader)) == SAMPLES // BATCH


def test_a_child_of_the_script_s_starts_its_own(applied: dict[str, Any]) -> None:
    loader = waiting_loader()
    waiting = pids(loader)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if len(list(loader)) == SAMPLES // BATCH else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert not any(map(is_gone, waiting))
    assert len(list(loader)) == SAMPLES // BATCH
    assert pids(loader) == waiting


def test_where_an_iterator_cannot_be_made_they_end(applied: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loader = waiting_loader()
    waiting = pids(loader)
    with monkeypatch.context() as patch:
        patch.setattr(PoolIter, "_make_pool", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            iter(loader)
    assert all(map(is_gone, waiting))
    assert len(list(loader)) == SAMPLES // BATCH


def test_a_loader_that_gets_no_workers_any_more(applied: dict[str, Any]) -> None:
    loader = waiting_loader()
    waiting = pids(loader)
    loader.num_workers, loader.prefetch_factor = 0, None
    assert len(list(loader)) == SAMPLES // BATCH
    assert all(map(is_gone, waiting))


def test_they_leave_if_no_epoch_comes(applied: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They have copies of what the script had open, such as a pipe whose end another process waits for."""
    monkeypatch.setattr(idle, "EXPIRES_S", 0.0)
    loader = waiting_loader()
    for pid in pids(loader):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # the test's time limit is theirs
    assert len(list(loader)) == SAMPLES // BATCH


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_the_script_handles_ends_no_epoch(number: signal.Signals, applied: dict[str, Any]) -> None:
    loader = waiting_loader()
    waiting = pids(loader)
    for pid in waiting:
        os.kill(pid, number)
    assert len(list(loader)) == SAMPLES // BATCH
    assert pids(loader) == waiting


def test_an_iterator_that_ends_after_another_one_keeps_nothing(applied: dict[str, Any]) -> None:
    """Its workers have the dataset as it was before."""
    loader = waiting_loader()
    first = iter(loader)
    next(first)
    loader.dataset.flip = 0.0
    list(loader)
    between = pids(loader)
    list(first)
    assert pids(loader) == between
