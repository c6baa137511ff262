"""A long run with deaths, errors and batches kept at random, and forty parents killed: nothing is left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import statistics
import time
import warnings
from collections import deque
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.loader.loader_state import state_of
from tests.helpers import left_in_shm, name_semaphores, shm

BATCH = 4
LIMIT_S = 600
LEAK_B = 40  # of a batch; an object takes more


class Numbers(Dataset[Any]):
    """Some samples fail."""

    def __init__(self, batches: int, bad: int) -> None:
        self.batches, self.bad = batches, bad

    def __len__(self) -> int:
        return self.batches * BATCH

    def __getitem__(self, i: int) -> Any:
        if i % self.bad == self.bad - 1:
            raise ValueError(f"bad sample {i}")
        return torch.tensor([i, i]) if i % 1000 else torch.full((60_000,), i)[:2].clone()


def soak(batches: int, kill_every: int) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    rng = random.Random(seed)
    me = psutil.Process()
    others = {p.pid for p in me.children(recursive=True)}  # of tests before: a fork server that stays
    bad = 40_009
    loader = stoker.DataLoader(
        Numbers(batches, bad), batch_size=BATCH, num_workers=2, on_error="skip", max_errors=10_000, quarantine=None
    )
    descriptors = me.num_fds()
    kept: deque[tuple[torch.Tensor, int]] = deque()
    memory: list[int] = []
    open_: list[int] = []
    kills, expected = 0, 0
    deadline = time.monotonic() + LIMIT_S
    it = iter(loader)
    for n, batch in enumerate(it):
        want = [i for i in range(n * BATCH, n * BATCH + BATCH) if i % bad != bad - 1]
        if n % 16 == 0 or len(want) < BATCH:
            assert batch[:, 0].tolist() == want
        expected += len(batch)
        if rng.random() < 0.01:
            kept.append((batch, int(batch[0, 0])))
        if len(kept) > 50 or (kept and rng.random() < 0.01):
            old, first = kept.popleft()
            assert int(old[0, 0]) == first
        if n % kill_every == kill_every // 2:
            victim = rng.choice([p for p in it._workers if p.is_alive()])
            os.kill(victim.pid, rng.choice([signal.SIGKILL, signal.SIGSEGV]))
            kills += 1
        if n % max(1, batches // 30) == 0:
            memory.append(me.memory_info().rss)
            open_.append(me.num_fds())
            assert time.monotonic() < deadline
    assert n + 1 == batches
    assert expected == batches * BATCH - batches * BATCH // bad
    slots = [reader.arena.slots for reader in state_of(loader).arenas]
    print(f"kills {kills}, memory {memory[0] >> 20} to {memory[-1] >> 20} MB, descriptors {open_}, slots {slots}")
    third = len(memory) // 3
    early, late = (statistics.median(part) for part in (memory[third : 2 * third], memory[2 * third :]))
    assert late - early < batches * LEAK_B / 3, memory
    assert max(open_[third:]) <= max(open_[:third]) + 2, open_
    assert max(slots, default=0) < 64
    del it, loader, batch
    kept.clear()
    gc.collect()
    assert me.num_fds() <= descriptors + 2
    assert {p.pid for p in me.children(recursive=True)} <= others


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_thirty_thousand_batches() -> None:
    soak(30_000, 2_000)


PARENTS, AT_ONCE = 20, 4
SETTINGS: list[dict[str, Any]] = [
    {"num_workers": 3},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": "auto"},
    {"num_workers": 2, "worker_method": "thread"},
]


def _left(session: int) -> list[psutil.Process]:
    out = []
    for p in psutil.process_iter():
        try:
            if os.getsid(p.pid) == session and p.status() != psutil.STATUS_ZOMBIE:
                out.append(p)
        except (OSError, psutil.Error):
            continue
    return out


def parent(settings: dict[str, Any]) -> None:
    """The life of a parent that is going to be killed."""
    os.setsid()
    name_semaphores()
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    warnings.simplefilter("ignore")
    while True:
        loader = stoker.DataLoader(Numbers(400, 1 << 60), batch_size=BATCH, **settings)
        kept = [batch for n, batch in enumerate(loader) if n % 7 == 0]
        assert kept


@pytest.mark.slow
def test_parents_that_are_killed_leave_nothing_behind() -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    rng = random.Random(seed)
    before = shm()
    for _ in range(PARENTS // AT_ONCE):
        children = {}
        for settings in rng.choices(SETTINGS, k=AT_ONCE):
            child = os.fork()
            if child == 0:
                try:
                    parent(settings)
                finally:
                    os._exit(1)
            children[child] = settings
        began = time.monotonic()
        for due, child in sorted((rng.uniform(0.0, 0.6), child) for child in children):
            time.sleep(max(0.0, began + due - time.monotonic()))
            assert os.waitpid(child, os.WNOHANG) == (0, 0), children[child]
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        limit = time.monotonic() + 30  # it takes a second; a busy machine adds to that
        while (left := [p for child in children for p in _left(child)]) and time.monotonic() < limit:
            time.sleep(0.01)
        assert not left, (children, left)
    assert not left_in_shm(before)
