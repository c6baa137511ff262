"""``stoker bench``: counts that are exact, waits that add up, a loader that is left as it was, and nothing left running."""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import stoker
from stoker.commands import bench, main
from stoker.commands.bench import measure
from stoker.core.errors import StokerError, UsageError
from stoker.core.nested import tensors
from stoker.loader.variant import ENGINES, variant
from tests.commands.helpers import importable

Both = collections.namedtuple("Both", "x y")


class Rows(Dataset[Any]):
    """28 bytes a sample: 5 floats and a number."""

    def __init__(self, n: int = 40) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.full((5,), float(i)), "y": i}


class Stream(IterableDataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        i = 0
        while i < self.n:
            yield i
            i += 1


class Once(IterableDataset[Any]):
    """Has one epoch, and no other."""

    def __init__(self, n: int) -> None:
        self.left = iter(range(n))

    def __iter__(self) -> Iterator[int]:
        return self.left


def raises(i: int) -> Any:
    raise KeyError(f"no file {i}")


def leaves(i: int) -> Any:
    raise SystemExit("had enough")


def dies(i: int) -> Any:
    os._exit(3)


class Fails(Rows):
    """Its sample 20 does not come."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, i: int) -> Any:
        return self.how(i) if i == 20 else torch.zeros(1)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("workers", [0, 2])
def test_counts_are_exact_and_times_add_up(engine: str, workers: int) -> None:
    loader = variant(DataLoader(Rows(100), batch_size=4, shuffle=True), num_workers=workers, engine=engine)
    before = children()
    found = measure(loader, 17, name="it")
    r = found
    assert (r.batches, r.samples, r.nbytes, r.epochs) == (17, 68, 68 * 28, 1)
    assert r.first_batch_s > 0
    assert 0 < r.wait_s <= r.seconds
    assert r.p50_s is not None
    assert r.p95_s is not None
    assert r.p99_s is not None
    assert 0 < r.p50_s <= r.p95_s <= r.p99_s <= r.wait_s
    assert r.samples_per_s == pytest.approx(68 / r.seconds)
    assert r.batches_per_s == pytest.approx(17 / r.seconds)
    assert r.mb_per_s == pytest.approx(68 * 28 / 1e6 / r.seconds)
    assert found.settings["engine"] == engine
    assert found.settings["num_workers"] == workers
    assert children() == before


def test_which_engine_it_was() -> None:
    assert measure(DataLoader(Rows()), 2).settings["engine"] == "torch"
    assert measure(stoker.DataLoader(Rows()), 2).settings["engine"] == "stoker"
    with stoker.installed():
        assert measure(DataLoader(Rows()), 2).settings["engine"] == "stoker"
        assert measure(variant(DataLoader(Rows()), engine="torch"), 2).settings["engine"] == "torch"


def test_the_iterator_is_the_engines() -> None:
    for engine, module in (("torch", "torch."), ("stoker", "stoker.")):
        for cls in (DataLoader, stoker.DataLoader):
            it = iter(variant(cls(Rows(), num_workers=1), engine=engine))  # type: ignore[operator]
            assert type(it).__module__.startswith(module)
            it._shutdown_workers()


@dataclass
class Pair:
    x: torch.Tensor
    words: str


def test_all_tensors_of_a_batch_count() -> None:
    one = torch.zeros(3)
    batch = [one, {"a": (one, "text", None)}, Both(one, 5), Pair(one, "x"), np.zeros(3), range(9)]
    assert len(list(tensors(batch))) == 4
    assert [bench._nbytes(t) for t in (one, one[:1], torch.eye(3).to_sparse())] == [12, 4, 12]


@pytest.mark.parametrize("workers", [0, 1])
def test_more_than_an_epoch(workers: int) -> None:
    found = measure(DataLoader(Rows(10), batch_size=4, num_workers=workers), 10)
    assert (found.batches, found.epochs) == (10, 4)
    assert found.samples == 3 * 10 + 2 * 4 - 4  # three epochs and two batches, less the first one's
    assert any("4 epochs were started" in note for note in found.notes)
    assert "epochs begun" in str(found)


def test_streams() -> None:
    found = measure(DataLoader(Stream(1 << 60), batch_size=3, num_workers=1), 30)
    assert (found.batches, found.samples, found.epochs) == (30, 90, 1)
    found = measure(DataLoader(Stream(5), batch_size=3), 5)
    assert (found.batches, found.epochs) == (5, 3)
    found = measure(DataLoader(Once(20), batch_size=4), 30)
    assert (found.batches, found.samples, found.epochs) == (4, 16, 1)
    assert any("4 of 30 batches were measured: another epoch yielded no batch" in note for note in found.notes)
    found = measure(DataLoader(Once(4), batch_size=4), 30)
    assert (found.batches, found.samples_per_s, found.p99_s) == (0, None, None)
    assert "samples/s" in str(found)
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.slow
def test_time_that_is_over() -> None:
    found = measure(DataLoader(Stream(1 << 60)), 1 << 50, budget_s=0.3)
    assert 0 < found.batches < 1 << 50
    assert any("the --time-limit of 0.3 s was reached" in note for note in found.notes)


def test_batches_that_were_ready_are_noted() -> None:
    loader = DataLoader(Rows(4000), num_workers=2)
    assert any("up to 4 of these 6 batches" in note for note in measure(loader, 6).notes)
    assert not measure(loader, 60).notes


def test_the_loader_is_left_as_it_was() -> None:
    """Its persistent workers, its place in the epoch, its attributes."""
    loader = stoker.DataLoader(Rows(), batch_size=4, num_workers=1, persistent_workers=True)
    it = iter(loader)
    first, attributes = next(it), dict(vars(loader))
    workers = children()
    measure(loader, 5)
    assert vars(loader) == attributes
    assert children() == workers
    assert first["y"].tolist() == [0, 1, 2, 3]
    assert next(it)["y"].tolist() == [4, 5, 6, 7]
    it._shutdown_workers()


class Random(Rows):
    def __getitem__(self, i: int) -> Any:
        return torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))])


def states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[union-attr, index]


@pytest.mark.parametrize("workers", [0, 1])
def test_random_state_moves_as_iterating_moves_it(workers: int) -> None:
    def seeded() -> DataLoader[Any]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        return DataLoader(Random(), batch_size=4, shuffle=True, num_workers=workers)

    it = iter(seeded())
    for _ in range(6):
        next(it)
    if workers:
        it._shutdown_workers()  # type: ignore[attr-defined]
    moved = states()
    measure(seeded(), 5)
    assert states() == moved


class Mine(DataLoader[Any]):
    """A class of the user's with arguments of its own."""

    def __init__(self, dataset: Any, extra: int) -> None:
        super().__init__(dataset, 4, shuffle=True, num_workers=1, prefetch_factor=5, timeout=9, drop_last=True)
        self.extra = extra


def test_a_variant_differs_in_what_was_asked_for_and_in_nothing_else() -> None:
    mine = Mine(Rows(), 7)
    for kw in ({}, {"num_workers": 2}, {"batch_size": 8}, {"engine": "stoker"}):
        twin: Any = variant(mine, **kw)  # type: ignore[arg-type]
        assert type(twin) is Mine
        assert (twin.extra, twin.sampler, twin.prefetch_factor, twin.timeout) == (7, mine.sampler, 5, 9)
        assert twin.num_workers == kw.get("num_workers", 1)
        assert twin.batch_size == twin.batch_sampler.batch_size == kw.get("batch_size", 4)
        assert twin.drop_last is twin.batch_sampler.drop_last is True
    assert len(list(variant(mine, num_workers=0, batch_size=16))) == 2
    twin = variant(variant(mine, engine="torch"), num_workers=2)
    assert twin._get_iterator.__self__ is twin
    assert (mine.num_workers, mine.batch_size) == (1, 4)


def test_a_loader_with_batches_of_its_own() -> None:
    loader = DataLoader(Rows(), batch_sampler=BatchSampler(SequentialSampler(range(40)), 4, False))
    assert measure(variant(loader, num_workers=1), 5).samples == 20
    assert measure(DataLoader(Rows(), batch_size=None), 5).samples == 25  # a sample of 5 rows is a batch
    for own in (loader, DataLoader(Rows(), batch_size=None)):
        with pytest.raises(UsageError, match="makes its own batches"):
            variant(own, batch_size=8)
    with pytest.raises(UsageError, match="Pass a number of workers"):
        variant(stoker.DataLoader(Rows(), num_workers="auto"), engine="torch")
    with pytest.raises(UsageError, match="one of torch, stoker"):
        variant(loader, engine="none")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("how", "workers", "words"),
    [
        (raises, 0, "it failed after 5 batches: KeyError: 'no file 20'"),
        (raises, 2, "it failed after 5 batches: KeyError: 'no file 20'"),
        (leaves, 0, "it failed after 5 batches: SystemExit: had enough"),
        (dies, 1, r"it failed (after \d batches|before the first batch): .*exited unexpectedly"),
    ],
)
def test_what_fails_is_named_and_nobody_stays(engine: str, how: Any, workers: int, words: str) -> None:
    before = children()
    loader = variant(DataLoader(Fails(how), batch_size=4, num_workers=workers), engine=engine)
    with pytest.raises(StokerError, match=words) as e:
        measure(loader, 30, name="it")
    assert not isinstance(e.value, UsageError)
    assert "\n" not in str(e.value)
    assert children() == before


def test_what_has_no_batch() -> None:
    for loader in (DataLoader(Stream(0)), DataLoader(Stream(0), num_workers=1)):
        with pytest.raises(UsageError, match="it is empty: it yielded no batch"):
            measure(loader, name="it")
    with pytest.raises(UsageError, match="drop_last drops"):
        measure(DataLoader(Rows(3), batch_size=4, drop_last=True))
    for kw in ({"batches": 0}, {"budget_s": 0.0}, {"budget_s": float("nan")}):
        with pytest.raises(UsageError):
            measure(DataLoader(Rows()), **kw)  # type: ignore[arg-type]


SCRIPT = """
    import threading, torch
    from torch.utils.data import Dataset, DataLoader

    class Data(Dataset):
        def __len__(self): return 400
        def __getitem__(self, i): return torch.full((5,), float(i))

    class Stuck(Data):
        def __getitem__(self, i): threading.Event().wait()

    class Bad(Data):
        def __getitem__(self, i): raise ValueError("broken")

    data = Data()
    def make_loader(): return DataLoader(data, batch_size=4)
    def stuck(): return DataLoader(Stuck(), num_workers=2)
    def bad(): return DataLoader(Bad(), num_workers=2)
    def empty(): return DataLoader([])
    five = 5
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from importable(tmp_path, monkeypatch, SCRIPT)


def test_the_command(target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*args: str) -> int:
        return main.main(["bench", *args])

    out = tmp_path / "out.json"
    line = [f"{target}:make_loader", "-n", "20", "--engine", "stoker", "--num-workers", "1", "--batch-size", "8"]
    assert run(*line, "--json", str(out)) == 0
    said = capfd.readouterr()
    assert "stoker's engine, 1 worker, batches of 8" in " ".join(said.out.split())  # the file's path may be long
    assert all(len(line) <= 80 or target in line for line in said.out.splitlines())
    assert ["loader"] in [line.split() for line in said.out.splitlines()]
    found = json.loads(out.read_text())
    assert (found["schema"], found["kind"], found["name"]) == (2, "bench", f"{target}:make_loader")
    assert (found["batches"], found["samples"]) == (20, 160)
    assert found["machine"]["cores"] >= 1
    assert run(f"{target}:data", "--json", "-") == 0
    assert json.loads(capfd.readouterr().out)["settings"]["batch_size"] == 32
    wrong = {
        (f"{target}:nothing",): "has no 'nothing'",
        ("no_such_file.py:x",): "does not exist",
        (f"{target}:five",): "not a Dataset or a DataLoader",
        (f"{target}:empty",): "is empty",
        (f"{target}:data", "--json", str(tmp_path / "no" / "file")): "cannot write the report",
    }
    for args, words in wrong.items():
        assert run(*args) == 2
        err = capfd.readouterr().err
        assert words in err
        assert err.count("\n") == 1
    assert run(f"{target}:bad") == 1
    assert "before the first batch: ValueError: broken\n" in capfd.readouterr().err
    for bad in (
        ["-n", "0"],
        ["--num-workers", "x"],
        ["--engine", "none"],
        ["--time-limit", "0"],
        ["--time-limit", "x"],
    ):
        assert run(f"{target}:data", *bad) == 2
        assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_while_a_batch_does_not_come(target: str) -> None:
    line = [sys.executable, "-m", "stoker", "bench", f"{target}:stuck"]
    p = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert p.stderr is not None
    assert "the first batch" in p.stderr.readline()  # progress, though the loop stands still
    workers = psutil.Process(p.pid).children(recursive=True)
    assert len(workers) == 2
    os.killpg(p.pid, signal.SIGINT)  # as a terminal does: to all of them
    out, err = p.communicate(timeout=60)
    assert (p.returncode, out, err) == (130, "", "stoker: interrupted\n")
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
