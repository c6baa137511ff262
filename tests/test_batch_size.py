"""``stoker batch-size``: the largest batch that fits a budget; the processes it takes to find out are real."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, SubsetRandomSampler

import stoker
from stoker.commands import main
from stoker.core import resources
from stoker.core.errors import UsageError, WorkerTimeoutError
from stoker.tuning import batch_size
from stoker.tuning.batch_size import BatchSizes, Trial, largest

MIB = 1 << 20
BUDGET = 64 * MIB  # 57.6 MiB without the margin: 28 samples of 1 MiB beside their batch


class Blocks(Dataset[torch.Tensor]):
    """Samples of 1 MiB."""

    def __init__(self, n: int = 1000) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((MIB // 4,), float(i))


class Small(Blocks):
    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i])


class Stream(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n, self.begun = n, 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter(range(self.n))


def loader(dataset: Any, batch_size: int = 4, **kw: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=batch_size, **kw)


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


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


def test_the_answer_fills_the_budget_less_its_margin() -> None:
    rss, state = psutil.Process().memory_info().rss, torch.get_rng_state()
    python, numpy = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr, index]
    found = largest(loader(Blocks(), shuffle=True), budget=BUDGET)
    consistent(found)
    assert 16 <= found.best <= 28  # what else a process needs differs by some MiB from one to the next
    assert [t.batch_size for t in found.trials[:4]] == [4, 8, 16, 32]
    assert min(t.batch_size for t in found.trials if not t.fits) - found.best <= max(1, found.best // 16)
    at = {t.batch_size: t for t in found.trials}
    assert 2 * found.best * MIB * 0.9 <= at[found.best].peak_bytes <= BUDGET * 0.9
    assert "memory" in found.bound
    assert (found.device, found.budget_bytes, found.own) == ("cpu", BUDGET, 4)
    assert psutil.Process().memory_info().rss - rss < 8 * MIB
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy  # type: ignore[union-attr, index]


def test_a_wider_margin_gives_a_smaller_batch() -> None:
    assert 5 <= largest(loader(Blocks()), budget=BUDGET, margin=0.5).best <= 16


def test_what_the_step_takes_counts() -> None:
    def step(batch: torch.Tensor) -> None:
        for _ in range(3):
            keep.append(batch * 2)
        keep.clear()

    keep: list[torch.Tensor] = []
    found = largest(loader(Blocks(), 16), step, budget=BUDGET)
    consistent(found)
    assert 7 <= found.best <= 14  # the batch and three more of its size: 16 do not fit
    assert "does not fit" in str(found)
    assert found.gain is None


def test_forward_and_backward() -> None:
    model = torch.nn.Linear(MIB // 4, 2)

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()

    assert largest(loader(Blocks()), step, budget=BUDGET, most=8).best == 8
    assert model.weight.grad is None  # it ran in a process of its own


def test_memory_that_numpy_and_python_are_refused() -> None:
    """A limit, not a look afterwards: 10 times the budget is refused before it is there."""

    def by_numpy(batch: Any) -> None:
        if len(batch) > 8:
            np.ones(10 * BUDGET, dtype=np.uint8)

    def by_python(batch: Any) -> None:
        if len(batch) > 8:
            bytearray(10 * BUDGET)

    def hidden(batch: Any) -> None:
        try:
            by_python(batch)
        except MemoryError as e:
            raise ValueError("cannot read") from e

    for step in (by_numpy, by_python, hidden):
        found = largest(loader(Small()), step, budget=BUDGET)
        consistent(found)
        assert found.best == 8
        assert "out of memory in step" in found.bound


def test_a_process_that_is_killed_did_not_fit() -> None:
    def step(batch: Any) -> None:
        if len(batch) > 6:
            os.kill(os.getpid(), signal.SIGKILL)

    found = largest(loader(Small()), step, budget=BUDGET)
    consistent(found)
    assert found.best == 6
    assert "signal 9" in found.bound


def test_not_even_one_sample() -> None:
    with pytest.raises(
        UsageError, match=r"not even one sample fits: it takes .*\d\.\d MiB.* allowed .*budget of 1\.0 MiB"
    ):
        largest(loader(Blocks()), budget="1MiB")


@pytest.mark.parametrize(
    ("n", "most", "best", "bound"),
    [(40, 65536, 40, "dataset: it has 40"), (40, 17, 17, "most=17"), (3, 100, 3, "dataset")],
)
def test_bounds_other_than_memory(n: int, most: int, best: int, bound: str) -> None:
    found = largest(loader(Small(n)), budget=BUDGET, most=most)
    consistent(found)
    assert found.best == best
    assert bound in found.bound


def test_the_samplers_own_indices() -> None:
    def step(batch: torch.Tensor) -> None:
        assert set(batch.flatten().tolist()) <= {5, 6, 7}

    assert largest(loader(Small(), sampler=SubsetRandomSampler([5, 6, 7])), step, budget=BUDGET).best == 3


def test_stokers_loader_and_a_collate_fn_of_its_own() -> None:
    def collate(samples: list[torch.Tensor]) -> dict[str, Any]:
        assert len({int(s) for s in samples}) == len(samples)  # no sample twice
        return {"x": torch.cat(samples)}

    def step(batch: dict[str, Any]) -> None:
        assert batch["x"].dim() == 1

    assert largest(stoker.DataLoader(Small(9), batch_size=2, collate_fn=collate), step, budget=BUDGET).best == 9


def test_an_iterable_dataset() -> None:
    data = Stream(50)
    found = largest(loader(data), budget=BUDGET)
    consistent(found)
    assert found.best == 50
    assert "it has 50 samples" in found.bound
    assert data.begun == 0  # in the trials' processes only
    assert largest(loader(Stream(3)), budget=BUDGET).best == 3  # fewer than the loader's own batch
    assert largest(loader(Stream(1 << 40)), budget=BUDGET, most=64).best == 64
    with pytest.raises(UsageError, match="empty"):
        largest(loader(Stream(0)), budget=BUDGET)


class Broken(Small):
    def __getitem__(self, i: int) -> torch.Tensor:
        raise KeyError(f"no file {i}")


class Leaves(Small):
    def __getitem__(self, i: int) -> torch.Tensor:
        os._exit(3)


def needs_cuda(batch: torch.Tensor) -> None:
    batch.to("cuda")


def bad_collate(samples: Any) -> Any:
    raise ZeroDivisionError("in here")


@pytest.mark.parametrize(
    ("made", "kw", "words"),
    [
        (lambda: loader(Broken()), {}, r"batch size 4: sample \d+ of the dataset raised KeyError: 'no file"),
        (lambda: loader(Leaves()), {}, "exit code 3"),
        (lambda: loader(Small(), collate_fn=bad_collate), {}, "collate_fn raised ZeroDivisionError: in here"),
        (lambda: loader(Small()), {"step": 5}, "step is of type int"),
        (lambda: DataLoader(Small(), batch_size=None), {}, "makes its own batches"),
        (
            lambda: DataLoader(Small(), batch_sampler=BatchSampler(SequentialSampler(range(9)), 3, False)),
            {},
            "makes its own batches",
        ),
        (lambda: Small(), {}, "of type Small, which is no DataLoader"),
        (lambda: loader(Small(0)), {}, "empty"),
        (lambda: loader(Small()), {"margin": 1.0}, "margin=1"),
        (lambda: loader(Small()), {"margin": math.nan}, "margin=nan"),
        (lambda: loader(Small()), {"most": 0}, "most=0"),
        (lambda: loader(Small()), {"seconds": 0.0}, "seconds=0"),
        (lambda: loader(Small()), {"budget": "much"}, "budget='much'"),
        (lambda: loader(Small()), {"budget": 1 << 60}, "of RAM are free"),
    ],
)
def test_what_cannot_be_done_is_said(made: Any, kw: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        largest(made(), **{"budget": BUDGET, **kw})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_a_step_that_needs_a_device_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"step raised .*(CUDA|NVIDIA)"):
        largest(loader(Small()), needs_cuda, budget=BUDGET)


def test_time_that_is_over() -> None:
    def step(batch: Any) -> None:
        if len(batch) > 8:
            threading.Event().wait()

    said: list[str] = []
    found = largest(loader(Small()), step, budget=BUDGET, seconds=1.5, progress=said.append)
    consistent(found)
    assert found.best == 8
    assert "time: 1.5 s" in found.bound
    assert 1.5 <= found.seconds < 30
    assert sum("batch of 16 samples, 8 fit" in words for words in said) >= 2
    with pytest.raises(WorkerTimeoutError, match=r"0\.2 s were over"):
        largest(loader(Small(), 16), step, budget=BUDGET, seconds=0.2)


def test_the_default_budget_is_a_quarter_of_what_is_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "memory_granted", lambda: 400 * MIB)
    monkeypatch.setattr(resources, "memory_available", lambda: 300 * MIB)
    assert largest(loader(Small(4))).budget_bytes == 100 * MIB
    monkeypatch.setattr(resources, "memory_available", lambda: 120 * MIB)
    assert largest(loader(Small(4))).budget_bytes == 60 * MIB


def test_killing_the_process_leaves_nobody() -> None:
    code = """
        import threading, torch
        from torch.utils.data import DataLoader, TensorDataset
        from stoker.tuning.batch_size import largest
        def step(batch):
            print("in", flush=True)
            threading.Event().wait()
        largest(DataLoader(TensorDataset(torch.zeros(9))), step, budget="64MB")
    """
    p = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert p.stdout is not None
    assert p.stdout.readline() == "in\n"
    children = psutil.Process(p.pid).children(recursive=True)
    assert children
    p.kill()  # not even a finally runs
    p.communicate()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


class Device:
    """Stands in for ``torch.cuda``: 100 bytes of memory."""

    def __init__(self) -> None:
        self.now, self.peak, self.emptied = 10, 10, 0

    def take(self, n: int) -> None:
        if self.now + n > 100:
            raise torch.cuda.OutOfMemoryError("Tried to allocate")
        self.peak = max(self.peak, self.now + n)

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.now

    def empty_cache(self) -> None:
        self.emptied += 1

    memory_allocated = memory_reserved = lambda self: self.now
    max_memory_allocated = lambda self: self.peak  # noqa: E731
    mem_get_info = lambda self: (90, 100)  # noqa: E731
    synchronize = get_rng_state = lambda self: None
    set_rng_state = lambda self, state: None  # noqa: E731
    get_device_name = lambda self: "stand-in"  # noqa: E731


def test_an_accelerators_out_of_memory_is_cleaned_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logic, with a stand-in; no accelerator was at hand."""
    device = Device()
    monkeypatch.setattr(batch_size, "counted", lambda: (device, torch.device("cpu")))
    pairs = [(torch.tensor([float(i)]), {"y": i}) for i in range(1000)]

    def step(batch: Any) -> None:
        assert isinstance(batch[0], torch.Tensor)
        assert batch[1]["y"].numel() == len(batch[0])
        seen.append(weakref.ref(batch[0]))
        device.take(len(batch[0]))

    seen: list[weakref.ref[torch.Tensor]] = []
    state = torch.get_rng_state()
    found = largest(loader(pairs, 32), step)
    assert found.best in range(76, 82)  # 90 free, 10 % of that kept so
    assert found.budget_bytes == 90
    assert device.emptied > len(found.trials)
    assert "stand-in" in found.device
    assert {t.why for t in found.trials if t.batch_size == 128} == {"out of memory in step"}
    assert largest(loader(pairs, 32), step, budget=50).best in range(43, 46)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(batch() is None for batch in seen)
    monkeypatch.setattr(resources, "memory_available", lambda: 1000)
    assert largest(loader(pairs, 16)).best <= 21  # 12 bytes a sample, twice, in half of 1000
    with pytest.raises(UsageError, match="not even one sample"):
        largest(loader(pairs, 1), lambda batch: device.take(1000))


def test_how_it_looks() -> None:
    trials = (
        Trial(8, True, 2 * MIB, 100.0, ""),
        Trial(32, False, 9 * MIB, None, "<it>"),
        Trial(16, True, 4 * MIB, 150.0, ""),
    )
    found = BatchSizes(16, trials, 8 * MIB, "cpu", "memory: <it>", 1.5, 8, 0.1)
    assert found.gain == 1.5
    lines = str(found).splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["100", "150"]
    assert lines[2].startswith("->")
    assert "1.50x the samples/s of the loader's own 8" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["trials"][1]["why"] == "<it>"
    assert "&lt;it&gt;" in found._repr_html_()
    assert "<it>" not in found._repr_html_()


SCRIPT = """
    import threading, torch
    from torch.utils.data import Dataset, DataLoader

    class Data(Dataset):
        def __len__(self): return 40
        def __getitem__(self, i): return torch.full((1 << 18,), float(i))

    def make_loader(): return DataLoader(Data(), batch_size=4)
    def step(batch): return (batch * 2).sum()
    def stuck(batch): threading.Event().wait()
    five = 5
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"script_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield str(tmp_path / f"{name}.py")
    sys.modules.pop(name, None)


def test_the_command(target: str, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "stoker", "batch-size", f"{target}:make_loader", "--step", f"{target}:step"]
    p = subprocess.run([*line, "--budget", "64MiB", "--json", "-"], capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stderr
    found = json.loads(p.stdout)
    assert 16 <= found["best"] <= 28
    assert found["own"] == 4
    assert found["gain"] > 0
    assert {"batch_size", "fits", "peak_bytes", "samples_per_s", "why"} == set(found["trials"][0])


def test_exit_codes_and_json(target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*args: str) -> int:
        return main.main(["batch-size", *args])

    out = tmp_path / "out.json"
    assert run(f"{target}:make_loader", "--budget", "1GB", "--most", "8", "--json", str(out)) == 0
    said = capfd.readouterr()
    assert json.loads(out.read_text())["best"] == 8
    assert "->           8" in said.out
    assert said.err == ""  # it did not take two seconds
    wrong = {
        ("--budget", "1MB"): "not even one sample",
        ("--step", f"{target}:five"): "step is of type int",
        ("--step", f"{target}:nothing"): "has no 'nothing'",
        ("--json", str(tmp_path / "no" / "file")): "cannot be written",
        ("--budget", "some"): "budget='some'",
    }
    for args, words in wrong.items():
        assert run(f"{target}:make_loader", *args) == 2
        assert words in capfd.readouterr().err
    assert run(f"{target}:make_loader", "--step", f"{target}:stuck", "--budget-s", "2.5") == 1
    said = capfd.readouterr()
    assert "trying a batch of 4 samples" in said.err
    assert "2.5 s were over" in said.err
    assert said.out == ""
    with pytest.raises(SystemExit, match="2"):
        run(f"{target}:make_loader", "--most", "0")
