"""Helpers fill a loader's cache under ``--apply``. Its batches, its errors and the script's generators stay torch's."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, Subset

from stoker.core.compare import equal_bits
from stoker.loader.loader_state import state_of
from stoker.staging import change_watch, fill_ahead
from stoker.tuning import apply, fill_helpers

from .conftest import put_behind_apply

N, BATCH = 64, 4
DEADLINE_S = 30.0
pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::stoker.StokerWarning")]


class Loader(DataLoader[Any]):
    """What ``--apply`` is put behind."""


class Waves(Dataset[Any]):
    """Its first part takes some hundred microseconds, the second one draws."""

    def __init__(self) -> None:
        self.gain, self.kind = 1.0, "plain"

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        x = wave(i) * self.gain
        if self.kind == "rare noise" and i == 5:
            x = x + np.random.rand()
        if self.kind == "rare line" and i == 5:
            print("sample 5")
        if self.kind == "rare error" and i == 5:
            raise ValueError("sample 5 is broken")
        if random.random() < 0.5:
            x = x[::-1].copy()
        return torch.from_numpy(x) + torch.randn(3)[0], np.random.randint(9)


def wave(i: int) -> Any:
    x = np.arange(2000, dtype=np.float64) + i
    for _ in range(12):
        x = np.log(np.exp(x / 5000)) * 5000
    return x


class Sums(Waves):
    """Their last bits depend on the number of native threads."""

    def __getitem__(self, i: int) -> Any:
        x = (torch.arange(200_001) * (i + 1.0)).sin()
        return (x * x).sum() + torch.rand(1)


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N - 1, -1, -1))

    def __len__(self) -> int:
        return N


def set_up(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.note = worker  # type: ignore[union-attr]


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each epoch's helpers. There are two for each loader that may have some, as on a machine with more cores."""
    put_behind_apply(Loader, monkeypatch)
    monkeypatch.setattr(fill_ahead, "LEAST_S", 0.0)
    monkeypatch.setattr(change_watch, "QUICK_S", math.inf)
    monkeypatch.setattr(fill_helpers, "first_guess", lambda loader: (max(1, int(loader.num_workers)) + 2, ""))
    monkeypatch.setattr(apply, "first_guess", lambda loader: (max(1, int(loader.num_workers)) + 2, ""))
    out: list[Any] = []
    start = fill_ahead.FillAhead._start_if_due

    def noted(self: Any) -> None:
        start(self)
        if self._helpers:
            out.append([pid for _, pid in self._helpers])

    monkeypatch.setattr(fill_ahead.FillAhead, "_start_if_due", noted)
    return out


def epochs(
    cls: type[DataLoader[Any]],
    data: Dataset[Any],
    count: int = 2,
    at_batch: Callable[[int, DataLoader[Any]], None] = lambda k, loader: None,
    **how: Any,
) -> list[Any]:
    """All batches, the error that ended an epoch, and the generators after each batch."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    how = {"batch_size": BATCH, "shuffle": True, **how}
    loader = cls(data, **{k: v() if k in ("generator", "sampler") else v for k, v in how.items()})
    out: list[Any] = []
    for _ in range(count):
        try:
            for k, batch in enumerate(loader):
                generator = loader.generator
                after = random.random(), np.random.rand(), torch.rand(1), generator and generator.get_state()
                out.append((batch, after))
                at_batch(k, loader)
        except ValueError as e:
            out.append(str(e).splitlines()[-1])
    return out


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_filled(k: int, loader: DataLoader[Any], least: int = N) -> None:
    """Waits as long as helpers run: nobody else fills the cache meanwhile."""
    until = time.monotonic() + DEADLINE_S
    known = next((known for known in apply._datasets if known.staged is not None), None)
    while k == 4 and known is not None and known.staged is not None and known.staged.account.filled < least:
        assert time.monotonic() < until, f"{known.staged.account}"
        os.sched_yield()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("shuffle", [True, False])
def test_helpers_fill_the_cache_and_nobody_can_tell(helped: list[Any], workers: int, shuffle: bool) -> None:
    how: dict[str, Any] = {"num_workers": workers, "shuffle": shuffle}
    least = N if workers == 0 else BATCH * 7  # two batches more than were delivered
    found = epochs(Loader, Waves(), at_batch=lambda k, loader: wait_until_filled(k, loader, least), **how)
    assert helped, "no helpers were started"
    assert equal_bits(found, epochs(DataLoader, Waves(), **how))
    assert not any(runs(pid) for group in helped for pid in group)


def test_a_subset_asks_for_its_own_samples(helped: list[Any]) -> None:
    half = Subset(Subset(Waves(), list(range(N - 1, 7, -1))), np.arange(0, N - 8, 2))  # type: ignore[arg-type]
    found = epochs(Loader, half, at_batch=lambda k, loader: wait_until_filled(k, loader, len(half)))
    assert helped
    assert equal_bits(found, epochs(DataLoader, half))


@pytest.mark.parametrize("kind", ["rare noise", "rare line", "rare error"])
@pytest.mark.parametrize("workers", [0, 1])
def test_rare_branches(helped: list[Any], capfd: pytest.CaptureFixture[str], kind: str, workers: int) -> None:
    def made(cls: type[DataLoader[Any]]) -> tuple[list[Any], list[str]]:
        data = Waves()
        data.kind = kind
        out = epochs(cls, data, 3, num_workers=workers)
        sys.stdout.flush()
        return out, [line for line in capfd.readouterr().out.splitlines() if "sample" in line]

    found, lines = made(Loader)
    wanted, lines_wanted = made(DataLoader)
    assert equal_bits(found, wanted)
    assert len(lines) in (len(lines_wanted), len(lines_wanted) + 1)  # docs/concepts/exact.md: twice the first time


def test_a_change_within_an_epoch_is_seen_at_once(helped: list[Any]) -> None:
    def change(k: int, loader: DataLoader[Any], waits: bool = True) -> None:
        if waits and len(helped) == 1:
            wait_until_filled(k, loader)
        if k in (4, 9):
            loader.dataset.gain = 2.0 if k == 4 else 1.0  # type: ignore[attr-defined]

    found = epochs(Loader, Waves(), 3, change)
    assert helped
    assert equal_bits(found, epochs(DataLoader, Waves(), 3, lambda k, loader: change(k, loader, False)))


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_helper_that_dies_or_stops_changes_nothing(helped: list[Any], kill: int, workers: int) -> None:
    def hit(k: int, loader: DataLoader[Any]) -> None:
        if k in (3, 5) and helped:
            with contextlib.suppress(ProcessLookupError):  # of an epoch before
                os.kill(helped[-1][k // 4], kill)

    assert equal_bits(
        epochs(Loader, Waves(), at_batch=hit, num_workers=workers), epochs(DataLoader, Waves(), num_workers=workers)
    )
    assert not any(runs(pid) for group in helped for pid in group)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_breaks_leaves_no_process(helped: list[Any], workers: int) -> None:
    def some(cls: type[DataLoader[Any]]) -> list[Any]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        loader, out = cls(Waves(), batch_size=BATCH, shuffle=True, num_workers=workers), []
        for _ in range(3):
            for k, batch in enumerate(loader):
                out.append(batch)
                if k == 5:
                    break
        del batch
        return out

    found = some(Loader)
    assert helped
    assert equal_bits(found, some(DataLoader))
    assert not multiprocessing.active_children()
    assert not any(runs(pid) for group in helped for pid in group)


@pytest.mark.parametrize(
    "how",
    [
        {"sampler": Backwards, "shuffle": False},
        {"sampler": lambda: RandomSampler(range(N), generator=torch.Generator().manual_seed(3)), "shuffle": False},
        {"generator": lambda: torch.Generator().manual_seed(3)},
    ],
    ids=["own sampler", "sampler's generator", "loader's generator"],
)
def test_an_order_that_the_script_can_look_at_is_drawn_in_time(helped: list[Any], how: dict[str, Any]) -> None:
    assert equal_bits(epochs(Loader, Waves(), **how), epochs(DataLoader, Waves(), **how))
    assert not helped


def test_no_helpers_if_worker_init_fn_sets_up_workers(helped: list[Any]) -> None:
    how: dict[str, Any] = {"num_workers": 1, "worker_init_fn": set_up}
    assert equal_bits(epochs(Loader, Waves(), **how), epochs(DataLoader, Waves(), **how))
    assert not helped


def test_no_helpers_while_a_thread_runs_the_scripts_code(helped: list[Any]) -> None:
    over = threading.Event()
    thread = threading.Thread(target=lambda: over.wait(DEADLINE_S))
    thread.start()
    try:
        assert equal_bits(epochs(Loader, Waves()), epochs(DataLoader, Waves()))
        assert not helped
    finally:
        over.set()
        thread.join()


def test_bits_that_depend_on_native_threads_are_those_of_the_script(helped: list[Any]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert equal_bits(epochs(Loader, Sums(), 3), epochs(DataLoader, Sums(), 3))
    finally:
        torch.set_num_threads(before)


def test_more_workers_are_taken_back_when_samples_may_draw(helped: list[Any]) -> None:
    """Augmentation that is switched on after a warm-up."""

    def switched(cls: type[DataLoader[Any]]) -> tuple[list[Any], list[int]]:
        torch.manual_seed(5)
        data = Mapped()
        loader, out, counts = cls(data, batch_size=BATCH, shuffle=True, num_workers=1), [], []
        for epoch in range(4):
            if epoch == 2:
                data.then = noisy
            out += list(loader)
            counts.append(int(loader.num_workers))
        return out, counts

    found, counts = switched(Loader)
    wanted, _ = switched(DataLoader)
    assert equal_bits(found, wanted)
    assert counts[1] > 1, "it got no more workers"
    assert counts[2:] == [1, 1]


class Mapped(Dataset[Any]):
    def __init__(self) -> None:
        self.then: Callable[[Any], Any] = abs

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.then(torch.from_numpy(wave(i)))


def noisy(x: Any) -> Any:
    return x + torch.randn(1)


def test_the_state_of_the_engine_is_clean_afterwards(helped: list[Any]) -> None:
    loader = Loader(Waves(), batch_size=BATCH)
    list(loader)
    assert state_of(loader).helpers is None
