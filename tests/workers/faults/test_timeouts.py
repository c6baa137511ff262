"""Samples that hang: named, with the stack of their worker, which is replaced."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import stoker
from stoker.core.errors import SampleTimeoutError, UsageError, WorkerTimeoutError
from stoker.loader.loader_state import state_of
from stoker.transport.arena import Arena
from stoker.workers import hangs as stuck

LIMIT_S = 90
KILL_S = 60.0
TIMEOUT_S = 0.5  # a sample that does not hang takes microseconds, however busy the machine is
MODES: dict[str, dict[str, Any]] = {
    "two": {"num_workers": 2},
    "auto": {"num_workers": "auto"},
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},
}
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(LIMIT_S)]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Hanging(Dataset):
    def __init__(self, *hangs: int, n: int = 40) -> None:
        self.hangs, self.n = hangs, n
        self.files = [f"{i}.jpg" for i in range(n)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        drawn = torch.rand(())
        if i in self.hangs:
            self.never()
        return torch.stack([torch.tensor(float(i)), drawn])

    def never(self) -> None:
        threading.Event().wait()


class Deaf(Hanging):
    """As what sleeps in the kernel: it does not even answer, whichever threads the worker has."""

    def never(self) -> None:
        signal.signal(stuck.DUMP_SIGNAL, signal.SIG_IGN)
        threading.Event().wait()


class Batched(Hanging):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[i] for i in indices]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def loader_of(dataset: Any, mode: dict[str, Any], **kw: Any) -> Any:
    loader = stoker.DataLoader(dataset, **{"batch_size": 4, "sample_timeout": TIMEOUT_S, **mode, **kw})
    if mode.get("num_workers") == "auto":
        loader.resize(2)
    return loader


@pytest.mark.few(1)
@pytest.mark.parametrize(("mode", "dataset"), [("two", Hanging), ("auto", Batched), ("spawn", Hanging)])
def test_the_sample_and_the_line_are_named_and_the_others_come(mode: str, dataset: Any) -> None:
    it = iter(loader_of(dataset(9), MODES[mode]))
    rows = [next(it)[:, 0].tolist() for _ in range(2)]
    before = [psutil.Process(p.pid) for p in it._workers]
    with pytest.raises(SampleTimeoutError) as e:
        next(it)
    assert isinstance(e.value, WorkerTimeoutError)
    assert f"sample 9 (9.jpg) was not loaded within sample_timeout={TIMEOUT_S} seconds" in str(e.value)
    assert "in never" in str(e.value)
    assert "in __getitem__" in str(e.value)
    now = {p.pid for p in it._workers}
    deadline = time.monotonic() + KILL_S
    while any(map(is_alive, [p for p in before if p.pid not in now])):  # the one that hung; a kill takes effect later
        assert time.monotonic() < deadline
    rows += [batch[:, 0].tolist() for batch in it]
    assert list(itertools.chain(*rows)) == [float(i) for i in range(40) if not 8 <= i < 12]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "dataset"), [("two", Hanging), ("auto", Batched)])
def test_the_policy_decides(mode: str, dataset: Any, tmp_path: Path) -> None:
    loader = loader_of(dataset(9, 10), MODES[mode], on_error="skip")
    assert [int(x[0]) for batch in loader for x in batch] == [i for i in range(40) if i not in (9, 10)]
    lines = (tmp_path / "stoker-quarantine.jsonl").read_text().splitlines()
    listed = [json.loads(line) for line in lines]
    assert [(f["index"], f["kind"]) for f in listed] == [(9, "timeout"), (10, "timeout")]
    assert listed[0]["error"] == f"SampleTimeout: not loaded within {TIMEOUT_S} s"
    assert state_of(loader).metrics.faults["timeouts"] >= 2
    found = [int(x[0]) for batch in loader_of(dataset(9), MODES[mode], on_error="replace") for x in batch]
    assert len(found) == 40
    assert 9 not in found


@pytest.mark.slow
def test_what_does_not_answer_is_killed_as_well() -> None:
    it = iter(loader_of(Deaf(1), MODES["two"]))
    with pytest.raises(SampleTimeoutError, match=r"sample 1 \(1.jpg\).*\n  in the kernel"):
        next(it)
    assert next(it)[:, 0].tolist() == [4, 5, 6, 7]


@pytest.mark.slow
def test_a_single_sample() -> None:
    loader = loader_of(Hanging(2, n=5), MODES["two"], batch_size=None, on_error="skip")
    assert [int(x[0]) for x in loader] == [0, 1, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["two", "auto"])
def test_where_nothing_hangs_no_bit_changes(mode: str) -> None:
    found = []
    for kw in ({"sample_timeout": 60}, {"sample_timeout": None}):
        for dataset in (Hanging(), Batched()):
            torch.manual_seed(3)
            found.append(torch.cat([b.clone() for b in loader_of(dataset, MODES[mode], shuffle=True, **kw)]))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_slow_consumer_is_no_slow_sample() -> None:
    """Whoever does not ask does not wait: nobody looks at the clock meanwhile, and what is done is done."""
    it = iter(loader_of(Hanging(), MODES["two"], sample_timeout=TIMEOUT_S))
    next(it)
    threading.Event().wait(1.5 * TIMEOUT_S)
    assert len(list(it)) == 9


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize(
    ("dataset", "kw", "words"),
    [
        (Hanging(), {"sample_timeout": 0}, "positive number of seconds"),
        (Hanging(), {"sample_timeout": "1"}, "positive number of seconds"),
        (Hanging(), {"sample_timeout": True}, "positive number of seconds"),
        (Hanging(), {"num_workers": 0}, "needs a worker process"),
        (Stream(), {}, "needs a map-style dataset"),
        (Hanging(), {"on_worker_death": "raise"}, "does not allow"),
        (Hanging(), {"worker_method": "thread"}, "threads cannot be killed"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_settings_that_cannot_be_say_what_to_do(dataset: Any, kw: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        stoker.DataLoader(dataset, **{"num_workers": 1, "sample_timeout": 1.0, **kw})


def test_workers_taken_away_later_are_missed() -> None:
    loader = stoker.DataLoader(Hanging(), num_workers=1, sample_timeout=1)
    loader.num_workers = 0
    with pytest.raises(UsageError, match="needs a worker process"):
        iter(loader)


class Slow(Hanging):
    """Samples 5 and 6 end when somebody says so; 6 says that it has begun."""

    def __init__(self, folder: Path) -> None:
        super().__init__(n=12)
        self.folder = folder

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 5:
            wait_for(self.folder / "go")
        if i == 6:
            (self.folder / "behind").touch()
            wait_for(self.folder / "on")
        return super().__getitem__(i)


def wait_for(path: Path) -> None:
    end = time.monotonic() + LIMIT_S / 3
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.001)


@pytest.mark.parametrize("mode", ["two", "auto"])
@pytest.mark.parametrize("when", ["asked", "killed"])
@pytest.mark.few(1)
def test_a_sample_that_is_only_a_little_late_blames_nobody(
    mode: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends while its worker is asked for its stack, or in the instant in which the worker is killed."""

    def go_on(*_: Any) -> None:
        (tmp_path / "go").touch()
        wait_for(tmp_path / "behind")

    def stack(*_: Any) -> str:
        if when == "asked":
            go_on()
            (tmp_path / "on").touch()
        return "  somewhere"

    monkeypatch.setattr(stuck, "stack", stack)
    loader = loader_of(Slow(tmp_path), MODES[mode], on_error="skip")
    it = iter(loader)
    if when == "killed":
        for p in it._workers:
            monkeypatch.setattr(
                p, "kill", functools.partial(lambda kill: (go_on(), kill(), (tmp_path / "on").touch()), p.kill)
            )
    pids = [p.pid for p in it._workers]
    assert [int(x[0]) for batch in it for x in batch] == list(range(12))
    assert (when == "asked") == (pids == [p.pid for p in it._workers])
    assert not (tmp_path / "stoker-quarantine.jsonl").exists()


class Uneven(Dataset):
    """One sample at once; then many, which take until long after the one is late, and by far not too long."""

    def __init__(self) -> None:
        self.first = 0.0

    def __len__(self) -> int:
        return 1000

    def __getitems__(self, indices: list[int]) -> list[int]:
        if len(indices) == 1:
            self.first = time.monotonic()
        while len(indices) > 1 and not 0 < self.first < time.monotonic() - 3 * TIMEOUT_S:
            time.sleep(0.01)
        return indices


def test_a_place_never_comes_with_the_time_of_the_one_before() -> None:
    arena = Arena()
    pid = os.fork()
    if not pid:
        for place in itertools.count(1):
            arena.set_position(place, 7 * place)
    try:
        for _ in range(100_000):
            place, until = arena.position()
            assert until in (0, 7 * place)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
