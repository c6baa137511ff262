"""Threads that load samples inside a worker: the same batches to the bit, and none where that cannot be had."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import stoker
from stoker.core import processes
from stoker.core.compare import equal_bits
from stoker.core.errors import StokerWarning, UsageError
from stoker.core.processes import core_wait_s
from stoker.workers import read_threads
from stoker.workers.read_threads import DRAWS, MOST, OTHER, ReadThreads

LIMIT_S = 60  # fails on a hang, not on a busy machine
N, BATCH = 96, 12
FAR_S = 0.003  # what a sample waits for


@pytest.fixture(autouse=True)
def no_wait_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine there are fewer threads."""
    monkeypatch.setattr(processes, "core_wait_s", lambda: 0.0)


LOCK = threading.Lock()
INSIDE = torch.zeros(2, dtype=torch.int64).share_memory_()  # loads at this moment, and the most


class Far(Dataset[Any]):
    """Samples that wait, and then are what ``then`` says."""

    def __init__(self, then: Callable[[Far, int], Any] = lambda self, i: i) -> None:
        self.then = then
        self.rng = np.random.default_rng(3)
        self.lazy: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[torch.Tensor, Any]:
        with LOCK:
            INSIDE[0] += 1
            INSIDE[1] = INSIDE.max()
        time.sleep(FAR_S)
        with LOCK:
            INSIDE[0] -= 1
        return torch.full((3,), float(i)), self.then(self, i)


def lazily(self: Far, i: int) -> float:
    """Draws from a generator that the first sample makes."""
    if self.lazy is None:
        self.lazy = random.Random(5)
    return float(self.lazy.random())


def seen_by_all(self: Far, i: int) -> int:
    """Keeps the sample in an attribute while it waits."""
    self.lazy = i
    time.sleep(FAR_S)
    return int(self.lazy)


THEN: dict[str, Callable[[Far, int], Any]] = {
    "draws nothing": lambda self, i: i,
    "torch": lambda self, i: torch.rand(2),
    "python": lambda self, i: random.random(),
    "numpy": lambda self, i: np.random.random(),
    "its own generator": lambda self, i: float(self.rng.random()),
    "its own, made late": lazily,
    "some samples": lambda self, i: torch.rand(()) if i % 7 == 6 else torch.zeros(()),
    "one late sample": lambda self, i: torch.rand(()) if i == 60 else torch.zeros(()),
    "an attribute": seen_by_all,
}


def batches(dataset: Any, epochs: int = 1, **more: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(1)
    loader = stoker.DataLoader(dataset, **{"batch_size": BATCH, "num_workers": 2, "shuffle": True, **more})
    return [x for _ in range(epochs) for x in loader], loader


def same(a: Any, b: Any) -> bool:
    return equal_bits([list(x) for x in a], [list(x) for x in b])


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.filterwarnings("ignore:read_threads=")
@pytest.mark.parametrize(("name", "threads"), [(name, (4, "auto")[k % 2]) for k, name in enumerate(THEN)])
@pytest.mark.few(1)
def test_batches_are_those_without_threads(name: str, threads: int | str) -> None:
    more: dict[str, Any] = {"epochs": 2, "persistent_workers": True}
    expected, _ = batches(Far(THEN[name]), **more)
    found, _ = batches(Far(THEN[name]), read_threads=threads, **more)
    assert same(found, expected)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("kind", ["plain", "subset", "task seeds", "auto", "policy"])
@pytest.mark.few(1)
def test_samples_are_loaded_at_once(kind: str) -> None:
    INSIDE.zero_()
    dataset: Any = Subset(Far(), range(N - 1, -1, -1)) if kind == "subset" else Far()
    more: dict[str, Any] = {
        "task seeds": {"task_seeds": True},
        "auto": {"num_workers": "auto"},
        "policy": {"on_error": "skip", "sample_timeout": 30},
    }.get(kind, {})
    found, loader = batches(dataset, read_threads=4, shuffle=False, **more)
    order = torch.cat([x for _, x in found]).tolist()
    assert order == (list(range(N))[::-1] if kind == "subset" else list(range(N)))
    assert INSIDE[1] > int(loader.num_workers)
    assert any("4 threads in each worker" in line for line in loader.decisions)


def reads(load: Callable[[int], Any], threads: int | None = None) -> ReadThreads:
    """Has loaded a batch, some of it with threads, and the rest as a loader does."""
    out = ReadThreads(load, [load], threads)
    made = out(list(range(BATCH)))
    samples = [made[k] if k in made else load(k) for k in range(BATCH)]
    assert samples == [k * k for k in range(BATCH)]
    return out


def test_threads_are_used_where_loading_waits() -> None:
    def waits(i: int) -> int:
        time.sleep(0.02)
        return i * i

    found = reads(waits)
    assert not found.why_not
    assert found.count == MOST
    assert found([3, 4, 5, 6]) == {k: (3 + k) ** 2 for k in range(4)}
    assert found([5]) == {}  # one sample has no other beside it


class Clock:
    """Of a machine on which loading a sample takes so much time and processor time, whoever loads it."""

    def __init__(self, wall_s: float, cpu_s: float) -> None:
        self.each, self.wall_s, self.cpu_s = (wall_s, cpu_s), 0.0, 0.0
        self.threads: set[str] = set()

    def load(self, i: int) -> int:
        self.threads.add(threading.current_thread().name)
        self.wall_s, self.cpu_s = self.wall_s + self.each[0], self.cpu_s + self.each[1]
        return i * i

    def perf_counter(self) -> float:
        return self.wall_s

    def process_time(self) -> float:
        return self.cpu_s

    def process_time_ns(self) -> int:
        return 0

    thread_time_ns = process_time_ns


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "tried"), [(0.01, 0.005, False), (0.0001, 0.0, False), (0.01, 0.001, True)]
)
def test_threads_are_not_used_where_they_do_not_pay(
    wall_s: float, cpu_s: float, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where loading works, where it takes no time, and where it waits but threads wait for each other."""
    clock = Clock(wall_s, cpu_s)
    monkeypatch.setattr(read_threads, "time", clock)
    found = ReadThreads(clock.load, [])
    found(list(range(BATCH)))
    assert (found.count, found.why_not) == (0, "")
    assert (len(clock.threads) > 1) == tried


def test_waiting_for_a_core_is_no_waiting_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code that releases the GIL gets more of a busy core with more threads, at the cost of other workers."""
    clock = Clock(0.01, 0.001)
    monkeypatch.setattr(read_threads, "time", clock)
    monkeypatch.setattr(processes, "core_wait_s", lambda: 0.8 * clock.wall_s)
    found = ReadThreads(clock.load, [])
    found(list(range(BATCH)))
    assert found.count == 0
    assert len(clock.threads) == 1


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="Linux says how long threads wait")
def test_the_system_says_how_long_a_thread_waits_for_a_core() -> None:
    """A thread that shares one core with a process that computes waits for it, sooner or later."""
    cores = os.sched_getaffinity(0)
    began = core_wait_s()
    try:
        os.sched_setaffinity(0, {min(cores)})  # what is started is bound to it, too
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
            try:
                while core_wait_s() < began + 0.01:
                    pass
            finally:
                busy.kill()
    finally:
        os.sched_setaffinity(0, cores)


def test_what_a_dataset_shares_between_samples_is_found(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(range(BATCH)))
    notes: dict[int, int] = {}

    def notes_all(i: int) -> int:
        time.sleep(0.01)
        return notes.setdefault(i, i * i)

    with open(path, "rb", buffering=0) as file:

        def seeks(i: int) -> int:
            file.seek(i)
            time.sleep(0.01)
            return file.read(1)[0] ** 2

        assert "is an open FileIO" in reads(seeks).why_not
        with pytest.warns(
            StokerWarning, match="read_threads=8 has no effect: a sample differs when it is loaded in parallel"
        ):
            assert reads(seeks, threads=8).why_not == OTHER
    angles = itertools.cycle(range(4))

    class Turns:
        def __init__(self) -> None:
            self.angles = angles

        def __call__(self, i: int) -> int:
            time.sleep(0.01)
            return next(self.angles)

    turns = Turns()
    found = ReadThreads(turns, [turns])
    made = found(list(range(12)))
    assert made == {i: i % 4 for i in range(len(made))}
    assert found.why_not == "dataset.angles is a cycle, which threads would have to share"
    changes = "dataset.notes was a dict of 4 and is a dict of 12"
    assert reads(notes_all).why_not == f"loading samples changes the dataset: {changes}"


@pytest.mark.timeout(LIMIT_S)
def test_a_user_who_asked_for_threads_is_told_that_there_are_none() -> None:
    torch.manual_seed(0)
    found = ReadThreads(lambda i: float(torch.rand(())), [Far()], 4)
    with pytest.warns(
        StokerWarning, match=r"read_threads=4 has no effect: loading a sample draws random numbers\. stoker"
    ):
        made = found(list(range(8)))
    assert found.why_not == DRAWS
    torch.manual_seed(0)
    assert made == {0: float(torch.rand(()))}


def test_threads_that_are_slower_are_stopped_and_measured_again() -> None:
    far_s = 0.01

    def load(i: int) -> int:
        time.sleep(far_s)
        return i * i

    found = reads(load)
    assert found.count
    far_s = 0.1
    for _ in range(3):
        found([0, 1])
    assert found.count == 0
    assert not found.why_not


def test_a_server_that_refuses_many_requests_gets_one_at_a_time() -> None:
    limited, all_asked, asked = False, threading.Event(), []

    def load(i: int) -> int:
        if not limited:
            time.sleep(0.01)
            return i * i
        asked.append(i)
        if len(asked) == BATCH:
            all_asked.set()
        all_asked.wait()
        if i:
            raise ConnectionError("429")
        return i * i

    found = ReadThreads(load, [])
    assert found(list(range(BATCH))) == {k: k * k for k in range(BATCH)}
    assert found.count
    limited = True
    made = found(list(range(BATCH)))
    assert made == {0: 0}
    assert (found.count, found.why_not, found(list(range(BATCH)))) == (0, "", {})


def test_a_sample_is_compared_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_threads, "AGAIN", 2)
    main, shared = threading.current_thread(), False

    def load(i: int) -> int:
        time.sleep(0.01)
        return i * i + (shared and threading.current_thread() is not main)

    found = reads(load, threads=4)
    shared = True
    with pytest.warns(StokerWarning) as told:
        assert found([0, 1]) == {}
    texts = [str(w.message) for w in told]
    assert any(text.startswith("Sample 0 differs when it is loaded alone") for text in texts)
    assert found.why_not == OTHER


def fails(self: Far, i: int) -> int:
    if i in (40, 43):
        raise KeyError(f"sample {i} is not there")
    return i


@pytest.mark.timeout(LIMIT_S)
def test_the_first_sample_that_fails_is_the_error() -> None:
    with pytest.raises(KeyError, match="sample 40 is not there") as caught:
        batches(Far(fails), read_threads=4, shuffle=False)
    assert "stoker: while loading sample 40" in str(caught.value)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.filterwarnings("ignore:sample 4:stoker.StokerWarning")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["skip", "replace"])
def test_samples_that_fail_are_skipped(how: str, tmp_path: Path) -> None:
    more = {"on_error": how, "max_errors": 9, "quarantine": tmp_path / "bad.jsonl"}
    expected, _ = batches(Far(fails), **more)
    listed = (tmp_path / "bad.jsonl").read_text()
    found, _ = batches(Far(fails), read_threads=4, **more)
    assert same(found, expected)
    assert (tmp_path / "bad.jsonl").read_text().count("\n") == 2 * listed.count("\n")


def hangs(self: Far, i: int) -> int:
    if i == 50:
        threading.Event().wait()
    return i


def kills(self: Far, i: int) -> int:
    if i == 50:
        os.kill(os.getpid(), signal.SIGKILL)
    return i


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.filterwarnings("ignore::stoker.StokerWarning")
@pytest.mark.parametrize(("bad", "more"), [(hangs, {"sample_timeout": 0.5}), (kills, {})], ids=["hangs", "kills"])
def test_a_sample_that_hangs_or_kills_is_skipped(bad: Any, more: dict[str, Any], tmp_path: Path) -> None:
    more |= {"on_error": "skip", "quarantine": tmp_path / "bad.jsonl", "shuffle": False}
    found, _ = batches(Far(bad), read_threads=4, **more)
    assert torch.cat([x for _, x in found]).tolist() == [i for i in range(N) if i != 50]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.slow
@pytest.mark.parametrize("cache", ["ram", None])
def test_a_staged_dataset_prepares_at_once_and_draws_in_order(cache: str | None) -> None:
    def augment(sample: Any) -> Any:
        x, i = sample
        return x + torch.rand(3), i

    def prepare(sample: Any) -> Any:
        time.sleep(FAR_S)
        return torch.full((3,), float(sample)), sample

    def staged() -> Any:
        return stoker.Staged(list(range(N)), prepare=prepare, augment=augment, cache=cache)

    expected, one = batches(staged(), epochs=2, read_threads=1)
    found, several = batches(staged(), epochs=2, read_threads=4)
    assert same(found, expected)
    assert not any("threads in each worker" in line for line in one.decisions)
    assert any("threads in each worker" in line for line in several.decisions)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(N))


class Whole(Far):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


@pytest.mark.parametrize(
    ("dataset", "more", "text"),
    [
        (Far(), {"read_threads": 0}, 'positive integer, "auto" or None, not 0'),
        (Far(), {"read_threads": "all"}, "positive integer"),
        (Far(), {"read_threads": True}, 'positive integer, "auto" or None, not True'),
        (Stream(), {}, "an iterable dataset yields one sample at a time"),
        (Far(), {"batch_size": None}, "makes no batches"),
        (Far(), {"worker_method": "thread"}, "use more workers"),
        (Far(), {"num_workers": 0}, "Set num_workers to 1 or more"),
        (Whole(), {}, "a Whole makes whole batches"),
        (TensorDataset(torch.arange(3)), {}, "a TensorDataset makes whole batches"),
    ],
)
def test_what_cannot_be_is_refused(dataset: Any, more: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        stoker.DataLoader(dataset, **{"num_workers": 2, "read_threads": 4, **more})
