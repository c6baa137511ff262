"""Where resuming meets samples that fail, workers that die, and data on a device."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import stoker
from stoker.core.errors import StateError, UsageError, WorkerDiedError
from stoker.core.random_state import set_from_text
from stoker.device.prefetch import DeviceIter
from stoker.loader import device_iterator
from stoker.loader.device_iterator import ResidentIter
from stoker.loader.pin_thread import PinnedPool
from stoker.workers.protocol import WorkerReply
from tests.device.helpers import LateCopies
from tests.helpers import draw, room_for_workers

EPOCHS = 2


class Late(LateCopies):
    """Of batches of any form."""

    def send(self, batch: Any) -> tuple[Any, Any]:
        return batch, super().send(torch.zeros(1))[1]

    def arrive(self, batch: Any, event: Any) -> None:
        self.held -= 1


pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore::stoker.core.errors.StokerWarning"),
]


class Rotten(Dataset[Any]):
    """Some samples fail, a whole batch of them among these, and all draw."""

    def __init__(self, n: int = 21) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        if i % 5 == 1 or 9 <= i < 12:
            raise OSError(f"rotten {i}")
        return i, *draw()


class Memory(Dataset[Any]):
    """Has a state."""

    def __init__(self) -> None:
        self.seen = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        self.seen += 1
        return i, self.seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def plain(batch: Any) -> Any:
    if isinstance(batch, (list, tuple)):
        return [plain(b) for b in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def loader_of(dataset: Any, **more: Any) -> stoker.DataLoader[Any]:
    settings = {"batch_size": 3, "quarantine": None, "max_errors": 0.9} if "on_error" in more else {"batch_size": 3}
    return stoker.DataLoader(dataset, **{**settings, **more})


def shuffled(seed: int = 3) -> dict[str, Any]:
    return {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}


def run(loader: Any, epochs: int = EPOCHS) -> tuple[list[list[Any]], list[list[str]]]:
    """Batches of each epoch; and a state before the first, after each, and after the end."""
    batches: list[list[Any]] = []
    states: list[list[str]] = []
    for _ in range(epochs):
        it: Iterator[Any] = iter(loader)
        batches.append([])
        states.append([json.dumps(loader.state_dict())])
        for batch in it:
            batches[-1].append(plain(batch))
            states[-1].append(json.dumps(loader.state_dict()))
        states[-1].append(json.dumps(loader.state_dict()))
    return batches, states


def rest(loader: Any, state: str, epochs: int) -> list[list[Any]]:
    loader.load_state_dict(json.loads(state))
    torchs = json.loads(state)["torch_rng"]
    if torchs is not None:  # as a script does that has saved torch.get_rng_state(), too
        set_from_text(torch.default_generator, torchs)
    return [[plain(b) for b in loader] for _ in range(epochs)]


def check(make: Any, again: Any, every: int = 1) -> None:
    """From each state on a run has the batches of the one that nobody stopped."""
    batches, states = run(make())
    for e, of_epoch in enumerate(states):
        for k, state in enumerate(of_epoch):
            if k % every and k < len(of_epoch) - 2:
                continue
            over = k == len(of_epoch) - 1
            left = [*([] if over else [batches[e][k:]]), *batches[e + 1 :]]
            assert rest(again(), state, len(left)) == left, (e, k)


SKIP, REFILL, REPLACE = {"on_error": "skip"}, {"on_error": "skip", "refill": True}, {"on_error": "replace"}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("before", "after", "policy"),
    [
        (0, 0, SKIP),
        (0, 0, REPLACE),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in ((0, 2, REFILL), (2, 0, REPLACE), (3, 2, SKIP))),
    ],
)
def test_samples_that_fail(before: int, after: int, policy: dict[str, Any]) -> None:
    """A batch of which nothing is left counts as delivered; what stands in is the same."""

    def make(n: int) -> Any:
        return lambda: loader_of(Rotten(), num_workers=n, task_seeds=True, **policy, **shuffled())

    check(make(before), make(after), 2)


@pytest.mark.slow
def test_in_order_a_whole_batch_is_left_out() -> None:
    def make(**more: Any) -> Any:
        return lambda: loader_of(Rotten(), on_error="skip", task_seeds=True, **more)

    check(make(), make(num_workers=2))
    check(make(num_workers=2, worker_method="thread"), make())
    check(make(num_workers=2, persistent_workers=True), make(num_workers=2, persistent_workers=True), 3)


def test_too_many_failures_are_delivered_too() -> None:
    loader = loader_of(Rotten(), on_error="skip", max_errors=0)
    it = iter(loader)
    with pytest.raises(stoker.StokerError, match="max_errors allows 0"):
        next(it)
    assert loader.state_dict()["next"] == 1


class Dies(Dataset[Any]):
    """One sample kills its worker, once."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.at = folder, at

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        if i == self.at and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return i, random.random(), float(torch.rand(()))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["auto", 2])
def test_a_worker_that_dies_after_a_resume(tmp_path: Path, workers: Any) -> None:
    def make(at: int = -1) -> Any:
        return loader_of(Dies(tmp_path, at), num_workers=workers, task_seeds=True, **shuffled())

    batches, states = run(make(), 2)
    for k in (1, 4):
        (tmp_path / "died").unlink(missing_ok=True)
        victim = batches[0][k + 2][0][0]
        assert rest(make(victim), states[0][k], 2) == [batches[0][k:], batches[1]]
        assert (tmp_path / "died").exists()


@pytest.mark.slow
def test_torch_s_seeds_and_a_worker_that_dies(tmp_path: Path) -> None:
    """Nobody makes those random numbers again, but a death changes none of what a resumed run has."""
    state = run(loader_of(Dies(tmp_path, -1), num_workers=2, **shuffled()), 1)[1][0][2]
    whole = rest(loader_of(Dies(tmp_path, -1), num_workers=2, **shuffled()), state, 2)
    victim = whole[0][3][0][0]
    assert rest(loader_of(Dies(tmp_path, victim), num_workers=2, **shuffled()), state, 2) == whole
    assert (tmp_path / "died").exists()


def test_a_dataset_with_a_state_is_not_begun_anew_in_another_worker() -> None:
    class Killer(Memory):
        def __getitem__(self, i: int) -> Any:
            if i == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(i)

    with pytest.raises((WorkerDiedError, RuntimeError), match=r"exited unexpectedly|killed by signal"):
        list(loader_of(Killer(), num_workers=1))
    with pytest.raises(UsageError, match='on_worker_death="restart" replaces a worker that dies, but the dataset'):
        loader_of(Memory(), num_workers=1, on_worker_death="restart")
    with pytest.raises(UsageError, match="sample_timeout replaces the worker that hangs, but the dataset's state"):
        loader_of(Memory(), num_workers=1, sample_timeout=3.0)
    assert [len(x) for x, _ in loader_of(Memory(), num_workers=2, on_error="skip")] == [3, 3, 3, 3]


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_and_samples_that_fail(workers: int) -> None:
    class Both(Memory):
        def __getitem__(self, i: int) -> Any:
            if 3 <= i < 7:
                raise OSError("rotten")
            return super().__getitem__(i)

    def make() -> Any:
        return loader_of(Both(), num_workers=workers, on_error="skip")

    check(make, make)


# -- data on a device, and batches ahead of the consumer


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_iterator, "is_on_device", lambda _: True)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("own", [False, True])
def test_data_on_a_device(standing_in: None, settings: dict[str, Any], own: bool) -> None:
    data = TensorDataset(torch.arange(20))
    torch.manual_seed(7)

    def make() -> Any:
        return loader_of(data, **settings, **(shuffled() if own else {"shuffle": True}))

    assert isinstance(iter(make()), ResidentIter)
    check(make, make)


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", SETTINGS)
def test_data_that_moves_to_a_device_in_mid_run(
    standing_in: None, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To whoever resumes it does not matter where the batches were made."""
    data = TensorDataset(torch.arange(20))

    def epochs(move_at: int) -> tuple[list[Any], list[list[str]]]:
        loader = loader_of(data, **settings, **shuffled())
        batches: list[Any] = []
        states: list[list[str]] = []
        for e in range(3):
            monkeypatch.setattr(device_iterator, "is_on_device", lambda _, e=e: e >= move_at)
            more, at = run(loader, 1)
            batches += more
            states += at
        return batches, states

    want, _ = epochs(3)
    got, states = epochs(1)
    assert got == want
    for on_device in (False, True):
        monkeypatch.setattr(device_iterator, "is_on_device", lambda _, on=on_device: on)
        for e, k in ((0, 3), (1, 0), (1, 2), (1, 7), (1, 8)):
            left = [*([] if k == 8 else [want[e][k:]]), *want[e + 1 :]]
            assert rest(loader_of(data, **settings, **shuffled()), states[e][k], len(left)) == left, (on_device, e, k)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("workers", "kind", "depth"),
    [(0, Rotten, 3), (1, Rotten, 1), (0, Memory, 1), (1, Memory, 3), (1, Stream, 3)],
)
def test_what_was_copied_ahead_is_not_delivered(
    workers: int, kind: Any, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        more: dict[str, Any] = {} if kind is Stream else {"on_error": "skip", **shuffled()}
        return loader_of(kind(), num_workers=workers, task_seeds=True, **more)

    def ahead() -> Any:
        loader = make()
        whole = type(loader).__iter__
        own = type("Ahead", (type(loader),), {"__iter__": lambda self: DeviceIter(whole(self), Late(depth), depth)})
        loader.__class__ = own
        return loader

    check(ahead, make)
    check(ahead, ahead, 2)


def test_errors_ahead_come_in_their_turn() -> None:
    loader = loader_of(Rotten(12), task_seeds=True)
    it = DeviceIter(iter(loader), Late(3), 3)
    for k in range(4):
        with nullcontext() if k == 1 else pytest.raises(OSError, match="rotten"):
            next(it)
        assert loader.state_dict()["next"] == k + 1
    assert not loader.state_dict()["finished"]
    assert next(it, None) is None
    assert loader.state_dict()["finished"]


def test_batches_ahead_of_batches_ahead() -> None:
    loader = loader_of(range(30))
    it = DeviceIter(DeviceIter(iter(loader), Late(2), 2), Late(3), 3)
    for k in range(10):
        next(it)
        assert loader.state_dict()["next"] == k + 1
    assert next(it, None) is None
    assert loader.state_dict()["finished"]


def test_a_device_s_loader_says_its_place() -> None:
    loader = loader_of(range(12), device="cpu")
    assert loader.state_dict()["next"] == 0
    it = iter(loader)
    next(it)
    state = loader.state_dict()
    assert state["next"] == 1 == it.state_dict()["next"]
    again = loader_of(range(12), device="cpu")
    again.load_state_dict(state)
    assert [b.tolist() for b in again] == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_what_a_worker_says_is_still_there_behind_the_thread_that_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(data: Any, _: Any) -> Any:
        raise OSError("no memory")

    class Result:
        worker = epoch = task = nbytes = 0
        ended, times = False, (0, 0, 0, 0)

        def take(self) -> Any:
            return WorkerReply("batch", 4, b"state", False)

    monkeypatch.setattr("stoker.loader.pin_thread.pin", fails)
    pool = PinnedPool.__new__(PinnedPool)
    pool.off, pool._device, pool._index = False, None, 0
    told = pool._pin(Result()).take()  # type: ignore[arg-type]
    assert told[1:] == (4, b"state", False)
    with pytest.raises(OSError, match="no memory"):
        told.data.reraise()


# -- fewer workers than were asked for


class Parts(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        for i in range(info.id, 20, info.num_workers):
            yield i, *draw()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many workers the system has processes for."""
    return room_for_workers(monkeypatch, 99)


@pytest.mark.slow
def test_a_run_keeps_its_parts_with_fewer_workers_than_asked_for(room: list[int]) -> None:
    def make() -> Any:
        return loader_of(Parts(), num_workers=4)

    batches, states = run(make())
    room[0] = 2
    for k in (0, 3, 5):
        assert rest(make(), states[0][k], 1) == [batches[0][k:]]
        assert [len(e) for e in rest(make(), states[0][k], 2)] == [8 - k, 8]


def test_states_by_worker_are_not_divided_among_fewer(room: list[int]) -> None:
    state = run(loader_of(Memory(), num_workers=2), 1)[1][0][1]
    room[0] = 1
    with pytest.raises(StateError, match="num_workers=2"):
        rest(loader_of(Memory(), num_workers=2), state, 1)


@pytest.mark.slow
def test_a_run_begun_with_fewer_goes_on_with_more(room: list[int]) -> None:
    room[0] = 2
    batches, states = run(loader_of(range(20), num_workers=4, persistent_workers=True))
    room[0] = 99
    assert rest(loader_of(range(20), num_workers=4), states[0][2], 2) == [batches[0][2:], batches[1]]
    assert json.loads(states[1][2])["workers"] == 2
