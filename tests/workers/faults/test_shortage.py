"""Too few descriptors, processes or addresses: fewer workers and a warning, no hang, no bus error, every batch right."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.core.errors import BudgetError, StokerWarning
from tests.helpers import room_for_workers

N, BATCH = 160, 8


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.full((50, 50), float(i))


def right(loader: Any) -> bool:
    return [float(b[-1, 0, 0]) for b in loader] == [float(i + BATCH - 1) for i in range(0, N, BATCH)]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many workers the system has room for."""
    return room_for_workers(monkeypatch, 3)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_fewer_workers_where_there_can_be_no_more(processes: list[int], context: str) -> None:
    loader = stoker.DataLoader(Numbers(), batch_size=BATCH, num_workers=4, multiprocessing_context=context)
    with pytest.warns(StokerWarning, match=r"2 workers instead of 4.*Resource temporarily unavailable"):
        it = iter(loader)
    assert len(it._workers) == it._num_workers == 2
    assert right(it)
    processes[0] = 4
    assert len(iter(loader)._workers) == 4


def test_not_one_is_an_error_that_says_what_to_do(processes: list[int]) -> None:
    processes[0] = 0
    with pytest.raises(BudgetError, match="num_workers=0, which loads in this process"):
        iter(stoker.DataLoader(Numbers(), batch_size=BATCH, num_workers=4))


def test_one_more_in_mid_epoch_is_done_without(processes: list[int]) -> None:
    loader = stoker.DataLoader(Numbers(), batch_size=BATCH, num_workers="auto")
    loader.resize(2)
    seen = []
    for b in loader:
        seen.append(float(b[0, 0, 0]))
        if len(seen) == 3:
            loader.resize(6)
    assert seen == [float(i) for i in range(0, N, BATCH)]


SCRIPT = """
import os, resource, sys, warnings
sys.path.insert(0, {root!r})
import torch, stoker
from tests.workers.faults.test_shortage import BATCH, Numbers, right
warnings.simplefilter("always")
warnings.simplefilter("ignore", ResourceWarning)
list(stoker.DataLoader(Numbers(), batch_size=BATCH, num_workers=1))
if {what!r} == "files":
    limit = len(os.listdir("/proc/self/fd")) + {room}
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
else:
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * 4096 + ({room} << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
loader = stoker.DataLoader(Numbers(), batch_size=BATCH, num_workers=6, prefetch_factor=8)
assert right(loader) and right(loader)
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "room"), [("files", 11), ("addresses", 8)])
def test_real_limits(what: str, room: int) -> None:
    code = SCRIPT.format(root=str(Path(__file__).parents[3]), what=what, room=room)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "right\n", done.stderr[-2000:]
    if what == "files":
        assert "workers instead of 6" in done.stderr


def test_the_limit_of_processes_itself() -> None:
    """Not for root, whom it does not bind."""
    if os.geteuid() == 0:
        pytest.skip("root may have as many as it likes")
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    try:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
        with pytest.raises(BudgetError):
            iter(stoker.DataLoader(Numbers(), batch_size=BATCH, num_workers=4))
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
