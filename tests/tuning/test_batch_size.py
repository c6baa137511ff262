"""``stoker batch-size``: the largest batch that fits an accelerator's memory; a stand-in with 64 MiB takes its place."""

from __future__ import annotations

import gc
import json
import math
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, SubsetRandomSampler

import stoker
from stoker.commands import main
from stoker.core import resources
from stoker.core.errors import UsageError, WorkerTimeoutError
from stoker.tuning import batch_size
from stoker.tuning.batch_size import BatchSizes, BatchSizeTrial, largest
from tests.commands.helpers import importable

MIB = 1 << 20


class Device:
    """Stands in for ``torch.cuda``: 64 MiB of memory, of which steps take some with ``take``."""

    def __init__(self) -> None:
        self.now, self.peak, self.emptied, self.total = 0, 0, 0, 64 * MIB

    def take(self, n: int) -> None:
        if self.now + n > self.total:
            raise torch.cuda.OutOfMemoryError("Tried to allocate")
        self.peak = max(self.peak, self.now + n)

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.now

    def empty_cache(self) -> None:
        self.emptied += 1

    memory_allocated = memory_reserved = lambda self: self.now
    max_memory_allocated = lambda self: self.peak  # noqa: E731
    mem_get_info = lambda self: (self.total - self.now, self.total)  # noqa: E731
    synchronize = get_rng_state = lambda self: None
    set_rng_state = lambda self, state: None  # noqa: E731
    get_device_name = lambda self: "stand-in"  # noqa: E731


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(batch_size, "counted", lambda: (device, torch.device("cpu")))
    gc.freeze()  # each trial collects garbage, which need not go through all modules of this process
    yield device
    gc.unfreeze()


class Small(Dataset[torch.Tensor]):
    def __init__(self, n: int = 1000) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def loader(dataset: Any, batch_size: int = 4, **kw: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=batch_size, **kw)


def consistent(found: BatchSizes) -> None:
    """What holds for every answer."""
    sizes = [t.batch_size for t in found.trials]
    assert len(sizes) == len(set(sizes))
    assert found.best == max(t.batch_size for t in found.trials if t.fits)
    for t in found.trials:
        assert t.fits == (t.batch_size <= found.best)
        assert t.fits == (not t.why) == (t.samples_per_s is not None)
        if t.fits:
            assert t.peak_bytes <= found.budget_bytes * (1 - found.margin)


@pytest.mark.slow
def test_the_answer_fills_the_budget_less_its_margin(device: Device) -> None:
    """57.6 of 64 MiB are allowed, and a sample takes one."""
    state, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr, index]
    seen: list[weakref.ref[torch.Tensor]] = []

    def step(batch: torch.Tensor) -> None:
        seen.append(weakref.ref(batch))
        device.take(len(batch) * MIB)
        np.random.rand()

    found = largest(loader(Small(), shuffle=True), step)
    consistent(found)
    assert 54 <= found.best <= 57
    assert [t.batch_size for t in found.trials[:5]] == [4, 8, 16, 32, 64]
    assert {t.batch_size: t.peak_bytes for t in found.trials}[found.best] == found.best * MIB
    assert "memory" in found.bound
    assert (found.device, found.budget_bytes, found.own) == ("cpu (stand-in)", 64 * MIB, 4)
    assert device.emptied > len(found.trials)
    assert all(batch() is None for batch in seen)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy  # type: ignore[union-attr, index]
    assert 27 <= largest(loader(Small()), step, margin=0.5).best <= 32


@pytest.mark.slow
def test_out_of_memory_is_told_apart_from_errors(device: Device) -> None:
    def hidden(batch: Any) -> None:
        try:
            device.take(len(batch) * 8 * MIB)
        except RuntimeError as e:
            raise ValueError("cannot read") from e

    found = largest(loader(Small(), 32), hidden)
    consistent(found)
    assert found.best == 7
    assert found.gain is None
    assert next(t.why for t in found.trials if t.batch_size == 32) == "out of memory in step"


@pytest.mark.slow
def test_host_memory_bounds_it_too(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "memory_available", lambda: 1000)
    assert largest(loader(Small(), 16)).best <= 31  # 8 bytes a sample, twice, in half of 1000


@pytest.mark.slow
def test_not_even_one_sample(device: Device) -> None:
    with pytest.raises(UsageError, match=r"not even a single sample fits: .*57\.6 MiB are available"):
        largest(loader(Small()), lambda batch: device.take(65 * MIB))


@pytest.mark.slow
@pytest.mark.parametrize("n", [40, 3])
def test_the_dataset_bounds_it(device: Device, n: int) -> None:
    found = largest(loader(Small(n)))
    consistent(found)
    assert found.best == n
    assert f"dataset: it has {n}" in found.bound


@pytest.mark.slow
def test_the_samplers_own_indices(device: Device) -> None:
    def step(batch: torch.Tensor) -> None:
        assert set(batch.flatten().tolist()) <= {5, 6, 7}

    assert largest(loader(Small(), sampler=SubsetRandomSampler([5, 6, 7])), step).best == 3


@pytest.mark.slow
def test_stokers_loader_and_a_collate_fn_of_its_own(device: Device) -> None:
    def collate(samples: list[torch.Tensor]) -> dict[str, Any]:
        assert len({int(s) for s in samples}) == len(samples)  # no sample twice
        return {"x": torch.cat(samples)}

    def step(batch: dict[str, Any]) -> None:
        assert batch["x"].dim() == 1

    assert largest(stoker.DataLoader(Small(9), batch_size=2, collate_fn=collate), step).best == 9


class Broken(Small):
    def __getitem__(self, i: int) -> torch.Tensor:
        raise KeyError(f"no file {i}")


def bad_collate(samples: Any) -> Any:
    raise ZeroDivisionError("in here")


@pytest.mark.parametrize(
    ("made", "kw", "words"),
    [
        (lambda: loader(Broken()), {}, r"batch size 4: sample \d+ of the dataset raised KeyError: 'no file"),
        (lambda: loader(Small(), collate_fn=bad_collate), {}, "collate_fn raised ZeroDivisionError: in here"),
        (lambda: loader(Small()), {"step": 5}, "step is of type int"),
        (lambda: DataLoader(Small(), batch_size=None), {}, "makes its own batches"),
        (
            lambda: DataLoader(Small(), batch_sampler=BatchSampler(SequentialSampler(range(9)), 3, False)),
            {},
            "makes its own batches",
        ),
        (lambda: Small(), {}, "of type Small, not a DataLoader"),
        (lambda: loader(Small(0)), {}, "empty"),
        (lambda: loader(Small()), {"margin": 1.0}, "margin=1"),
        (lambda: loader(Small()), {"margin": math.nan}, "margin=nan"),
        (lambda: loader(Small()), {"seconds": 0.0}, "seconds=0"),
        (lambda: loader(Stream()), {}, "is iterable"),
    ],
)
def test_what_cannot_be_done_is_said(device: Device, made: Any, kw: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        largest(made(), **kw)


def test_without_an_accelerator_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "counted", lambda: None)
    with pytest.raises(UsageError, match="accelerator"):
        largest(loader(Small()))


@pytest.mark.slow
def test_time_that_is_over(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(batch_size.time, "monotonic", lambda: clock[0])

    def step(batch: Any) -> None:
        clock[0] += len(batch)

    said: list[str] = []
    found = largest(loader(Small()), step, seconds=30.0, progress=said.append)
    consistent(found)
    assert found.best == 8
    assert "did not finish within 30 s" in found.bound
    assert said == ["trying a batch of 4 samples", "trying a batch of 8 samples, 4 fit"]
    with pytest.raises(WorkerTimeoutError, match=r"found within 0\.2 s"):
        largest(loader(Small(), 16), lambda batch: (step(batch), device.take(1 << 40)), seconds=0.2)


def test_how_it_looks() -> None:
    trials = (
        BatchSizeTrial(8, True, 2 * MIB, 100.0, ""),
        BatchSizeTrial(32, False, 9 * MIB, None, "<it>"),
        BatchSizeTrial(16, True, 4 * MIB, 150.0, ""),
    )
    found = BatchSizes(16, trials, 8 * MIB, "cuda", "memory: <it>", 1.5, 8, 0.1)
    assert found.gain == 1.5
    lines = str(found).splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["100", "150"]
    assert lines[2].startswith("->")
    assert "1.50x the samples/s of the loader's own 8" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["trials"][1]["why"] == "<it>"


SCRIPT = """
    import torch
    from torch.utils.data import Dataset, DataLoader

    class Data(Dataset):
        def __len__(self): return 40
        def __getitem__(self, i): return torch.full((1 << 18,), float(i))

    def make_loader(): return DataLoader(Data(), batch_size=4)
    def step(batch): return (batch * 2).sum()
    five = 5
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from importable(tmp_path, monkeypatch, SCRIPT)


@pytest.mark.slow
def test_the_command(device: Device, target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*args: str) -> int:
        return main.main(["batch-size", *args])

    out = tmp_path / "out.json"
    assert run(f"{target}:make_loader", "--step", f"{target}:step", "--json", str(out)) == 0
    said = capfd.readouterr()
    found = json.loads(out.read_text())
    assert (found["best"], found["own"]) == (40, 4)
    assert {"batch_size", "fits", "peak_bytes", "samples_per_s", "why"} == set(found["trials"][0])
    assert "->          40" in said.out
    assert run(f"{target}:make_loader", "--json", "-") == 0
    assert json.loads(capfd.readouterr().out)["best"] == 40
    wrong = {
        ("--step", f"{target}:five"): "step is of type int",
        ("--step", f"{target}:nothing"): "has no 'nothing'",
        ("--json", str(tmp_path / "no" / "file")): "cannot write the report",
    }
    for args, words in wrong.items():
        assert run(f"{target}:make_loader", *args) == 2
        assert words in capfd.readouterr().err
    assert run(f"{target}:make_loader", "--margin", "1") == 2
