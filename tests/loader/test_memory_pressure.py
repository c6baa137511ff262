"""Memory runs short in the middle of an epoch: the loader makes fewer batches ahead and goes on, to the bit."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.core import reclaim, resources
from stoker.core.errors import StokerWarning
from stoker.loader import memory_pressure
from stoker.loader.loader_state import state_of
from tests.contract import datasets as d


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is available, in bytes; looked at each time."""
    left = [1 << 40]
    monkeypatch.setattr(resources, "memory_available", lambda: left[0])
    monkeypatch.setattr(resources, "memory_granted", lambda: 16 << 30)
    monkeypatch.setattr(resources, "pressure", lambda: {"memory": 50.0})
    monkeypatch.setattr(memory_pressure, "CHECK_S", 0.0)
    monkeypatch.setattr(reclaim, "_holders", set())  # caches of other tests
    return left


def epoch(loader: Any, short: list[int], left: int) -> list[Any]:
    short[0] = 1 << 40
    out = []
    for n, (x, i) in enumerate(loader):
        out.append((x.clone(), i.clone()))
        if n == 5:
            short[0] = left
    return out


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [3, "auto"])
def test_fewer_batches_are_made_ahead_and_none_changes(
    short: list[int], workers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def made() -> stoker.DataLoader[Any]:
        loader = stoker.DataLoader(d.Map(120, "big"), batch_size=3, num_workers=workers, prefetch_factor=4)
        if workers == "auto":
            loader.resize(3)
        return loader

    want = epoch(made(), short, 1 << 40)
    loader = made()
    with (
        caplog.at_level(logging.WARNING, "stoker.loader.memory_pressure"),
        pytest.warns(StokerWarning, match="MB of memory are left"),
    ):
        got = epoch(loader, short, 100 << 20)
    assert all((x == y).all() and (i == j).all() for (x, i), (y, j) in zip(want, got, strict=True))
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1
    assert "prefetches one batch only" in lines[0]
    assert loader.decisions[-1:] == lines


def test_free_slots_are_given_back(short: list[int]) -> None:
    loader = stoker.DataLoader(
        d.Map(300, "big"), batch_size=3, num_workers=2, prefetch_factor=6, persistent_workers=True
    )
    used = []

    def epoch() -> None:
        kept = []
        for n, batch in enumerate(loader):
            if n < 40:
                kept.append(batch)
            if n == 40:
                kept.clear()
            if n == 50:
                used.append(memory_of(loader))
                short[0] = 100 << 20
        used.append(memory_of(loader))

    with pytest.warns(StokerWarning, match="prefetches one batch only"):
        epoch()
    assert used[1] < used[0] / 2, used


def memory_of(loader: Any) -> int:
    readers = [reader for it in state_of(loader).iterators for reader in it._scheduler._pool._table.readers]
    return sum(Path(f"/proc/self/fd/{reader.arena.fd}").stat().st_blocks * 512 for reader in readers)


def test_caches_are_given_back_first(short: list[int]) -> None:
    class Holder:
        def __init__(self) -> None:
            self.held = 300 << 20

        def give_back(self, reason: str) -> int:
            given, self.held = self.held, 0
            return given

    said: list[str] = []
    shrunk: list[bool] = []
    holder = Holder()
    reclaim.add(holder)
    watch = memory_pressure.MemoryPressure(lambda: shrunk.append(True), said.append)
    short[0] = 100 << 20
    with pytest.warns(StokerWarning, match="freed the cache's 300 MB"):
        watch.check()
    assert not shrunk
    with pytest.warns(StokerWarning, match="prefetches one batch only"):
        watch.check()
    assert len(said) == 2
    assert shrunk


def test_stalls_count_where_little_is_left(short: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    shrunk: list[bool] = []
    watch = memory_pressure.MemoryPressure(lambda: shrunk.append(True), said.append)
    short[0] = 1200 << 20  # more than 5 %, less than 10 % of 16 GB
    monkeypatch.setattr(resources, "pressure", dict)
    watch.check()
    assert not said
    monkeypatch.setattr(resources, "pressure", lambda: {"memory": 50.0})
    with pytest.warns(StokerWarning, match="50 % of the time"):
        watch.check()
    watch.check()
    assert len(said) == len(shrunk) == 1


@contextlib.contextmanager
def cgroup(limit: int) -> Iterator[Path | None]:
    """A memory cgroup of one's own, version 1 or 2; None where there is none to be had."""
    for base, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        path = base / f"stoker-test-{time.monotonic_ns()}"
        with contextlib.suppress(OSError):
            path.mkdir()
            try:
                (path / name).write_text(str(limit))
                yield path
                return
            finally:
                with contextlib.suppress(OSError):
                    path.rmdir()
    yield None


FILLS = """
import logging, os, sys, warnings
with open({procs!r}, "w") as file:
    file.write(str(os.getpid()))
sys.path.insert(0, {tests!r})
import torch, stoker
from stoker.core import resources as machine; from stoker.loader import memory_pressure as pressure
pressure.CHECK_S = 0.05

class Data(torch.utils.data.Dataset):
    def __len__(self): return 600
    def __getitem__(self, i): return torch.full((1 << 20,), float(i))

logging.basicConfig(format="%(message)s")
loader = stoker.DataLoader(Data(), batch_size=2, num_workers="auto", prefetch_factor=6)
loader.resize(3)
ballast = []
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for n, batch in enumerate(loader):
        assert batch[:, 7].tolist() == [2.0 * n, 2.0 * n + 1]
        if machine.memory_available() > 220 << 20:
            ballast.append(torch.ones(4 << 20))
print("batches", n + 1, "ballast", len(ballast) * 16)
"""


@pytest.mark.slow
def test_a_cgroup_that_fills_up_is_survived(tmp_path: Path) -> None:
    """The script fills its memory itself, beside a loader that had 100 MB of batches under way."""
    with cgroup(1 << 30) as group:
        if group is None:
            pytest.skip("no cgroup of one's own to be had")
        code = FILLS.format(procs=str(group / "cgroup.procs"), tests=str(Path(__file__).parents[2]))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.startswith("batches 300 ballast")
        assert "each worker prefetches one batch only" in done.stderr


GROWS = """
import sys, torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self): return 1200
    def __getitem__(self, i):
        x = torch.full((250_000,), float(i))
        for _ in range(6):
            x = (x * 1.0001).sin() * 0 + float(i)
        return x + 0 * torch.rand(1)

if __name__ == "__main__":
    kept = []
    for epoch in range(2):
        seen = 0
        for k, x in enumerate(DataLoader(Data(), batch_size=4, num_workers=1)):
            assert (x[:, 0] == torch.arange(seen, seen + len(x)).float()).all()
            seen += len(x)
            if not epoch and k in (100, 150, 200):
                kept.append(torch.ones(25_000_000))
        assert seen == 1200
    print("done")
"""


@pytest.mark.slow
def test_a_script_that_grows_beside_a_cache_is_not_killed(tmp_path: Path) -> None:
    """It takes 300 MB in the middle of an epoch, which are there only if the cache gives its memory back."""
    with cgroup(900 << 20) as group:
        if group is None:
            pytest.skip("no cgroup of one's own to be had")
        path = tmp_path / "grows.py"
        path.write_text(GROWS)
        join = f"import os, runpy, sys; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        stoker_run = "runpy.run_module('stoker', run_name='__main__')"
        run = f"{join}; sys.argv = ['stoker', 'run', '--apply', {str(path)!r}]; {stoker_run}"
        done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=150, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout == "done\n"
