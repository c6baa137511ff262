"""``stoker verify``: the real command, on datasets that are whole, broken, killing, staged, and none at all."""

from __future__ import annotations

import json
import stat
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.commands import main
from stoker.commands.verify import verify
from tests.helpers import interrupt

pytestmark = pytest.mark.timeout(120)
SCRIPT = """
    import os, signal, threading, torch, stoker
    from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, SubsetRandomSampler

    class Photos(Dataset):
        def __init__(self, n=300, bad=(), kills=()):
            self.files = [f"{i}.jpg" for i in range(n)]
            self.bad, self.kills = bad, kills
        def __len__(self): return len(self.files)
        def __getitem__(self, i):
            if i in self.bad:
                raise OSError(f"cannot identify \\x1b[31m{self.files[i]}")
            if i in self.kills:
                os.kill(os.getpid(), signal.SIGSEGV)
            return torch.tensor(i)

    whole = Photos()
    broken = Photos(bad=(3, 77, 299))
    deadly = Photos(bad=(3,), kills=(50,))
    def make_loader():
        return DataLoader(broken, batch_size=4, sampler=SubsetRandomSampler([1, 2, 3]))
    staged = stoker.Staged(broken, prepare=torch.neg, cache="ram")
    part = Subset(staged, [5, 77, 6])
    class Stream(IterableDataset):
        def __iter__(self): return iter(range(4))
    stream = Stream()
    none = Photos(0)
    class Stuck(Photos):
        def __getitem__(self, i):
            if i == 9:
                os.write(1, b"reading\\n")
                threading.Event().wait()
            return 1
    stuck = Stuck()
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_v.py").write_text(textwrap.dedent(SCRIPT))
    return str(tmp_path / "train_v.py")


def run(*args: str) -> int:
    return main.main(["verify", *args])


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", ["0", "1", "3", "auto"])
def test_what_is_broken_is_listed(target: str, workers: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(f"{target}:broken", "--num-workers", workers, "--json", str(tmp_path / "out.json")) == 1
    said = capfd.readouterr().out
    assert said.startswith("3 of 300 samples are broken (")
    assert "3 OSError" in said
    assert "77: 77.jpg: OSError: cannot identify ?[31m77.jpg" in said  # which steers no terminal
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["schema"], found["samples"], found["read"]) == (1, 300, 300)
    assert [f["index"] for f in found["failed"]] == [3, 77, 299]
    assert not (tmp_path / "stoker-quarantine.jsonl").exists()


def test_what_kills_is_listed_as_well(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(f"{target}:deadly", "--num-workers", "2", "--json", "-") == 1
    found = json.loads(capfd.readouterr().out)
    assert [(f["index"], f["kind"]) for f in found["failed"]] == [(3, "error"), (50, "death")]
    assert "SIGSEGV" in found["failed"][1]["error"]


def test_what_hangs_is_listed_as_well(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(f"{target}:stuck", "--num-workers", "1", "--json", "-", "--sample-timeout", "1") == 1
    said = capfd.readouterr().out
    found = json.loads(said[said.index("{") :])  # "reading" comes from the dataset
    assert [(f["index"], f["kind"]) for f in found["failed"]] == [(9, "timeout")]
    assert run(f"{target}:stuck", "--num-workers", "0", "--sample-timeout", "1") == 2
    assert "sample_timeout needs a worker process" in capfd.readouterr().err


def test_a_whole_dataset_is_exit_code_0(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(f"{target}:whole") == 0
    assert capfd.readouterr().out.startswith("all 300 samples could be read (")


def test_a_loader_says_which_samples(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(f"{target}:make_loader", "--num-workers", "0") == 1
    assert capfd.readouterr().out.startswith("1 of 3 samples are broken")


def test_of_a_staged_dataset_the_source_is_read(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(f"{target}:staged", "--num-workers", "0", "--json", "-") == 1
    assert [f["index"] for f in json.loads(capfd.readouterr().out)["failed"]] == [3, 77, 299]
    module = sys.modules["train_v"]
    assert module.staged.account.filled == 0
    assert run(f"{target}:part", "--num-workers", "1", "--json", "-") == 1
    assert [(f["index"], f["file"]) for f in json.loads(capfd.readouterr().out)["failed"]] == [(1, "77.jpg")]


def test_what_is_broken_goes_to_a_file(target: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    assert run(f"{target}:broken", "--num-workers", "1", "--quarantine", str(path)) == 1
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [3, 77, 299]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_wrong_usage_is_exit_code_2(target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = {
        (f"{target}:nothing",): "has no 'nothing'",
        (f"{target}:stream",): "Stream is an iterable dataset",
        (f"{target}:none",): "is empty",
        (f"{target}:whole", "--json", str(tmp_path / "no" / "file")): "cannot write the report",
        (f"{target}:whole", "--quarantine", str(tmp_path / "no" / "file")): "cannot write",
    }
    for args, words in wrong.items():
        assert run(*args) == 2
        said = capfd.readouterr()
        assert words in said.err
        assert said.err.count("\n") == 1
        assert said.out == ""
    assert run(f"{target}:whole", "--num-workers", "few") == 2
    assert "'few' is not a number of workers" in capfd.readouterr().err


@pytest.mark.slow
def test_an_interrupt_leaves_nobody(target: str) -> None:
    interrupt("verify", f"{target}:stuck", "--num-workers", "2")


def test_progress_says_how_far(target: str) -> None:
    told: list[tuple[int, int]] = []
    loader: Any = stoker.DataLoader([torch_free] * 5000, batch_size=4)
    found = verify(loader, 0, on_progress=lambda done, total, failed: told.append((done, total)))
    assert told[0] == (0, 5000)
    assert (found.read, found.failed) == (5000, [])


torch_free = "no tensor"
