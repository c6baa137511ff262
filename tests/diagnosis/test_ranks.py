"""Ranks beside each other: what each waited, which one starves the others, which have unequal numbers of batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

import stoker
from stoker.core.errors import StokerWarning
from stoker.core.metrics import LoaderMetrics
from stoker.diagnosis.doctor import ranks
from stoker.diagnosis.report import text as report_text
from stoker.diagnosis.report.merge import Snapshot
from stoker.diagnosis.report.schema import Ranks
from stoker.loader import rank_batches

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


def snapshot(rank: int, world: int = 2, **metrics: Any) -> Snapshot:
    of_loader = {"batches": 10, "wait_s": 1.0, "step_s": 1.0, **metrics}
    return Snapshot(pid=rank, rank=rank, world=world, loaders=[LoaderMetrics("train.py:3", **of_loader)])


def compared(*snapshots: Snapshot) -> Ranks:
    found = ranks.compare(snapshots)
    assert found is not None
    return found


def text(found: Ranks, columns: int = 100) -> str:
    return "\n".join(report_text.rank_lines(found, columns))


def test_one_rank_is_compared_with_nothing() -> None:
    assert ranks.compare([snapshot(0, world=1)]) is None
    assert ranks.compare([snapshot(0)]) is None


def test_each_rank_has_a_line() -> None:
    found = compared(snapshot(1, wait_s=3.0), snapshot(0))
    assert [r.rank for r in found.each] == [0, 1]
    lines = text(found).splitlines()
    assert lines[2].split() == ["0", "10", "1.0", "s", "50%", "100.0", "ms"]
    assert lines[3].split() == ["1", "10", "3.0", "s", "75%", "100.0", "ms"]
    assert "rank 1 starves the others: it waits 300.0 ms" in lines[4]
    for columns in (40, 60):
        assert max(map(len, text(found, columns).splitlines())) <= columns


def test_of_many_ranks_those_that_waited_longest() -> None:
    found = compared(*(snapshot(i, 40, wait_s=float(i)) for i in range(40)))
    shown = [line.split()[0] for line in text(found).splitlines()[2:18]]
    assert shown == [str(i) for i in range(24, 40)]
    assert "of 40 ranks those that waited longest" in text(found)


@pytest.mark.parametrize(
    ("first", "second", "unequal"),
    [
        ({"settings": {"length": 13}}, {"settings": {"length": 13}}, None),
        ({"settings": {"length": 13}}, {"settings": {"length": 12}}, [(0, 13), (1, 12)]),
        ({"settings": {"length": None}, "ended": 1, "by_epoch": [[5]]}, {"ended": 1, "by_epoch": [[5]]}, None),
        ({"ended": 1, "by_epoch": [[5]]}, {"ended": 1, "by_epoch": [[4]]}, [(0, 5), (1, 4)]),
        ({"ended": 1, "by_epoch": [[5]]}, {"ended": 0, "by_epoch": [[6]]}, [(0, 5), (1, 6)]),  # waits for rank 0
        ({"ended": 1, "by_epoch": [[5]]}, {"ended": 0, "by_epoch": [[4]]}, None),  # was stopped
        ({"ended": 0, "by_epoch": [[5]]}, {"ended": 0, "by_epoch": [[4]]}, None),
        ({"ended": 2, "by_epoch": [[5], [5]]}, {"ended": 1, "by_epoch": [[5]]}, None),
        # It was killed in a collective: the sums are newer than the rows.
        ({"ended": 1, "epochs": 1, "batches": 10}, {"epochs": 1, "batches": 11, "by_epoch": [[8]]}, [(0, 10), (1, 11)]),
    ],
)
def test_unequal_numbers_of_batches(first: Any, second: Any, unequal: Any) -> None:
    found = compared(snapshot(0, **first), snapshot(1, **second))
    assert [u.batches for u in found.unequal] == ([] if unequal is None else [unequal])
    if unequal is not None:
        assert "train.py:3: ranks have unequal numbers of batches in an epoch" in " ".join(text(found).split())
        assert msgspec.json.decode(msgspec.json.encode(found), type=Ranks) == found


def test_ranks_of_before_a_restart_with_fewer_do_not_count() -> None:
    before = [snapshot(i, 3, settings={"length": 8}) for i in range(3)]
    after = [snapshot(i, 2, settings={"length": 12}) for i in range(2)]
    assert not compared(*before, *after).unequal


# -- before it hangs


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process a rank of a group."""
    store = dist.HashStore()
    monkeypatch.setattr(rank_batches, "_store", lambda: store)
    monkeypatch.setattr(rank_batches, "_warned", set())

    def be(n: int) -> None:
        monkeypatch.setattr(rank_batches, "_epochs", type(rank_batches._epochs)())
        monkeypatch.setattr(rank_batches, "rank_and_ranks", lambda: (n, 3))

    return be


def test_unequal_numbers_are_a_warning_at_the_beginning_of_the_epoch(
    rank: Any, recwarn: pytest.WarningsRecorder
) -> None:
    sizes = {0: 8, 1: 8, 2: 7}
    for n, size in sizes.items():
        rank(n)
        loader = stoker.DataLoader(range(size), batch_size=2, drop_last=True)
        iter(loader)
        iter(loader)  # said once
    (warning,) = [w for w in recwarn if w.category is StokerWarning]
    assert "Rank 2 has 3 batches in this epoch of DataLoader of range, rank 0 has 4." in str(warning.message)
    assert warning.filename == __file__


def test_other_loaders_and_epochs_are_not_compared(rank: Any, recwarn: pytest.WarningsRecorder) -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

        def __len__(self) -> int:
            raise AssertionError("asking for it would make torch count")

    class Batches(torch.utils.data.Sampler[list[int]]):
        def __iter__(self) -> Any:
            yield [0]

    rank(0)
    lengths = iter((5, 7))
    for _ in range(2):
        iter(stoker.DataLoader(range(next(lengths))))
    iter(stoker.DataLoader(torch.arange(9)))  # an evaluation in one rank
    iter(stoker.DataLoader(Stream()))
    iter(stoker.DataLoader(range(3), batch_sampler=Batches()))  # without a length
    rank(1)
    lengths = iter((5, 7))
    for _ in range(2):
        iter(stoker.DataLoader(range(next(lengths))))
    assert not [w for w in recwarn if w.category is StokerWarning]


def test_a_store_that_cannot_compare_is_no_error(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_batches, "_store", lambda: object())
    assert list(stoker.DataLoader(range(2)))


SCRIPT = """
import os, torch, torch.distributed as dist
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
for x in DataLoader(torch.arange(20 + dist.get_rank()), batch_size=4):
    if len(x) == 4:
        dist.all_reduce(x)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_stoker_run_says_it_before_and_after(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    source = str(Path(stoker.__file__).parents[1])
    command = [sys.executable, "-m", "stoker", "run", "--apply", sys.executable, "-m"]
    command += ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    env = {**os.environ, "PYTHONPATH": source, "XDG_CACHE_HOME": str(tmp_path)}
    p = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert p.returncode == 0, p.stderr
    assert "batches in this epoch of" in p.stderr
    found = json.loads((tmp_path / "stoker-report.json").read_text())["ranks"]
    assert [u["batches"] for u in found["unequal"]] == [[[0, 5], [1, 6]]]
    assert "ranks have unequal numbers of batches" in " ".join(p.stderr.split())
