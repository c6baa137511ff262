"""Helpers fill a loader's cache under ``--apply``. Batches, errors, files and the script's generators stay torch's."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, Subset

from stoker.core.compare import equal_bits
from stoker.loader.loader_state import state_of
from stoker.staging import fill_ahead
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


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N - 1, -1, -1))

    def __len__(self) -> int:
        return N


def set_up(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.note = worker  # type: ignore[union-attr]


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Process ids of the helpers. There are two for each loader that may have some, as with more cores."""
    put_behind_apply(Loader, monkeypatch)
    monkeypatch.setattr(fill_ahead, "LEAST_S", 0.0)
    monkeypatch.setattr(fill_helpers, "first_guess", lambda loader: (int(loader.num_workers) + 2, ""))
    pids, main, started = multiprocessing.Array("l", 64), fill_ahead._main, fill_ahead._started

    def noted(*args: Any) -> None:
        with pids.get_lock():
            pids[next(k for k in range(64) if not pids[k])] = os.getpid()
        main(*args)

    def counted(*args: Any) -> Any:
        helpers.started += 1
        return started(*args)

    monkeypatch.setattr(fill_ahead, "_main", noted)
    monkeypatch.setattr(fill_ahead, "_started", counted)
    helpers = Helpers(pids)
    yield helpers
    helpers.wait_for_their_end()


class Helpers:
    def __init__(self, pids: Any) -> None:
        self._pids = pids
        self.started = 0

    def __len__(self) -> int:
        return self.started

    @property
    def pids(self) -> list[int]:
        return [pid for pid in self._pids if pid]

    def wait_for_their_end(self) -> None:
        until = time.monotonic() + DEADLINE_S
        while any(map(psutil.pid_exists, self.pids)):
            assert time.monotonic() < until, f"helpers are left: {self.pids}"
            os.sched_yield()


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
    how = {"batch_size": BATCH, "shuffle": True, "num_workers": 1, **how}
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


def nothing_pays() -> bool:
    """Whether the trial found, on a busy machine, that caching costs more than it saves."""
    return all(known.staged is None for known in apply._datasets)


def wait_until_filled(k: int, loader: DataLoader[Any]) -> None:
    """Waits, after batch 4, until all samples that the loader has asked for are stored."""
    until = time.monotonic() + DEADLINE_S
    known = next((known for known in apply._datasets if known.staged is not None), None)
    while k == 4 and known is not None and known.staged is not None and known.staged.account.filled < BATCH * 7:
        assert time.monotonic() < until, f"{known.staged.account}"
        os.sched_yield()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"shuffle": False},
        {"persistent_workers": True},
        {"sampler": Backwards, "shuffle": False},
        {"sampler": lambda: RandomSampler(range(N), generator=torch.Generator().manual_seed(3)), "shuffle": False},
        {"generator": lambda: torch.Generator().manual_seed(3)},
    ],
    ids=["shuffled", "in order", "persistent", "own sampler", "sampler's generator", "loader's generator"],
)
def test_helpers_fill_the_cache_and_nothing_differs(helped: Helpers, how: dict[str, Any]) -> None:
    found = epochs(Loader, Waves(), at_batch=wait_until_filled, **how)
    assert helped or nothing_pays()
    assert equal_bits(found, epochs(DataLoader, Waves(), **how))
    assert not {child.pid for child in psutil.Process().children(recursive=True)} & set(helped.pids)


@pytest.mark.slow
def test_a_subset_asks_for_its_own_samples(helped: Helpers) -> None:
    half = Subset(Subset(Waves(), list(range(N - 1, 7, -1))), np.arange(0, N - 8, 2))  # type: ignore[arg-type]
    found = epochs(Loader, half, 3)
    assert helped or nothing_pays()
    assert equal_bits(found, epochs(DataLoader, half, 3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rare noise", "rare line", "rare error"])
def test_rare_branches(helped: Helpers, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    def made(cls: type[DataLoader[Any]]) -> tuple[list[Any], list[str]]:
        data = Waves()
        data.kind = kind
        out = epochs(cls, data, 3)
        sys.stdout.flush()
        return out, [line for line in capfd.readouterr().out.splitlines() if "sample" in line]

    found, lines = made(Loader)
    wanted, lines_wanted = made(DataLoader)
    assert equal_bits(found, wanted)
    assert len(lines) in (len(lines_wanted), len(lines_wanted) + 1)  # docs/concepts/exact.md: twice the first time


@pytest.mark.slow
def test_changes_within_an_epoch_come_with_the_next_one(helped: Helpers) -> None:
    def change(k: int, loader: DataLoader[Any]) -> None:
        if k in (0, 9):  # after workers have been started, and before helpers are
            loader.dataset.gain = 2.0 if k == 0 else 1.0  # type: ignore[attr-defined]
        if k == 4 and helped:
            let_helpers_go_first()

    def let_helpers_go_first() -> None:
        """Until they have stored what the worker has not begun, or have ended. If they have stored it, nothing shows."""
        worker = next(child for child in psutil.Process().children())
        worker.suspend()
        staged = next(known.staged for known in apply._datasets if known.staged is not None)
        filled, until = staged.account.filled, time.monotonic() + 1.0
        while staged.account.filled < filled + 2 and time.monotonic() < until:
            os.sched_yield()
        worker.resume()

    found = epochs(Loader, Waves(), 3, change)
    assert helped or nothing_pays()
    assert equal_bits(found, epochs(DataLoader, Waves(), 3, change))


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_helper_that_dies_or_stops_changes_nothing(helped: Helpers, kill: int) -> None:
    def hit(k: int, loader: DataLoader[Any]) -> None:
        if k in (3, 5) and helped:
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(helped.pids[k // 4], kill)

    assert equal_bits(epochs(Loader, Waves(), at_batch=hit), epochs(DataLoader, Waves()))
    for pid in helped.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_loop_that_breaks_leaves_no_process(helped: Helpers) -> None:
    def some(cls: type[DataLoader[Any]]) -> list[Any]:
        torch.manual_seed(3)
        loader, out = cls(Waves(), batch_size=BATCH, shuffle=True, num_workers=1), []
        for _ in range(3):
            for k, batch in enumerate(loader):
                out.append(batch)
                if k == 5:
                    break
        return out

    found = some(Loader)
    assert helped or nothing_pays()
    assert equal_bits(found, some(DataLoader))
    helped.wait_for_their_end()


@pytest.mark.slow
def test_no_helpers_if_worker_init_fn_sets_up_workers(helped: Helpers) -> None:
    assert equal_bits(
        epochs(Loader, Waves(), worker_init_fn=set_up), epochs(DataLoader, Waves(), worker_init_fn=set_up)
    )
    assert not helped


@pytest.mark.slow
def test_no_helpers_for_a_loader_without_workers(helped: Helpers) -> None:
    assert equal_bits(epochs(Loader, Waves(), num_workers=0), epochs(DataLoader, Waves(), num_workers=0))
    assert not helped


@pytest.mark.slow
def test_no_helpers_while_a_thread_runs_the_scripts_code(helped: Helpers) -> None:
    over = threading.Event()
    thread = threading.Thread(target=lambda: over.wait(DEADLINE_S))
    thread.start()
    try:
        assert equal_bits(epochs(Loader, Waves()), epochs(DataLoader, Waves()))
        assert not helped
    finally:
        over.set()
        thread.join()


class ByDescriptor(Waves):
    """Each sample is read in two parts, from where the first one ended."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fd = os.open(path, os.O_RDONLY)

    def __getitem__(self, i: int) -> Any:
        os.lseek(self.fd, i * 80, os.SEEK_SET)
        first = os.read(self.fd, 40)
        x = wave(i)
        rest = os.read(self.fd, 40)
        return torch.from_numpy(np.frombuffer(first + rest).copy() + x[:10]) * torch.rand(1)


@pytest.mark.slow
def test_a_helper_does_not_move_the_position_of_a_file(helped: Helpers, tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(np.arange(N * 10.0).tobytes())
    assert equal_bits(epochs(Loader, ByDescriptor(path), 3), epochs(DataLoader, ByDescriptor(path), 3))


def test_what_the_script_opens_or_closes_is_its_own(
    helped: Helpers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe to another process, a lock, a peer, and a log in place of the standard output. The worker has the latter
    only: it starts first."""
    log = (tmp_path / "log.txt").open("w")
    monkeypatch.setattr(sys, "stdout", log)
    print("begins")  # stays in the buffer
    opened: list[Any] = []
    seen: list[int] = []

    def use(k: int, loader: DataLoader[Any]) -> None:
        if not opened:
            assert not helped
            pipe = subprocess.PIPE
            opened[:] = subprocess.Popen(["wc", "-c"], stdin=pipe, stdout=pipe), (tmp_path / "lock").open("w")
            fcntl.flock(opened[1], fcntl.LOCK_EX)
            opened.extend(socket.socketpair())
        if k == 8 and not seen:
            seen.append(len(helped))
            counter, locked, mine, theirs = opened
            theirs.settimeout(DEADLINE_S)
            assert counter.communicate(b"four", DEADLINE_S)[0] == b"4\n"
            locked.close()
            with (tmp_path / "lock").open("w") as again:
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine.close()
            assert theirs.recv(1) == b""

    epochs(Loader, Waves(), at_batch=use, shuffle=False)
    assert seen or nothing_pays()
    helped.wait_for_their_end()
    log.close()
    assert (tmp_path / "log.txt").read_text() == "begins\n"


class RarelyDropped(Waves):
    """Neither the code of its samples nor the trial shows that some draw."""

    def __init__(self) -> None:
        super().__init__()
        self.then = torch.nn.Dropout(0.5)

    def __getitem__(self, i: int) -> Any:
        x = torch.from_numpy(wave(i))
        return self.then(x) if i == 5 else x


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_rare_samples_draw_what_the_scripts_own_workers_draw(helped: Helpers, workers: int) -> None:
    found = epochs(Loader, RarelyDropped(), 4, num_workers=workers)
    assert equal_bits(found, epochs(DataLoader, RarelyDropped(), 4, num_workers=workers))


def test_the_state_of_the_engine_is_clean_afterwards(helped: Helpers) -> None:
    loader = Loader(Waves(), batch_size=BATCH, num_workers=1)
    list(loader)
    assert state_of(loader).helpers is None
