"""Everything in one process: plain tracebacks that name the sample, its file and the transform."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

import stoker
from stoker.workers.exceptions import explain
from tests.helpers import Compose


class Halve:
    def __call__(self, x: float) -> float:
        if x == 7:
            raise ValueError("an odd one")
        return x / 2


class Data(Dataset):
    def __init__(self) -> None:
        self.transform = Compose(float, Halve())
        self.samples = [(f"photos/{i}.jpg", 0) for i in range(20)]
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[float, int]:
        assert get_worker_info() is None
        return self.transform(i), os.getpid()


def test_batches_are_made_here_and_are_the_same() -> None:
    torch.manual_seed(0)
    data = Subset(Data(), [i for i in range(20) if i != 7])
    loader = stoker.DataLoader(data, batch_size=4, shuffle=True, num_workers=3, debug=True)
    torch.manual_seed(5)
    seen = list(loader)
    assert {int(p) for _, pids in seen for p in pids} == {os.getpid()}
    torch.manual_seed(5)
    plain = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(seen, plain, strict=True))
    assert loader.num_workers == 3


def test_auto_measures_nothing() -> None:
    loader = stoker.DataLoader(Subset(Data(), range(5)), num_workers="auto", debug=True)
    assert len(list(loader)) == 5
    assert loader.decisions == []


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(20))], ids=["plain", "inside another"])
def test_an_error_says_where(wrap: Any) -> None:
    with pytest.raises(ValueError, match="an odd one") as e:
        list(stoker.DataLoader(wrap(Data()), batch_size=4, num_workers=2, debug=True))
    note = explain(e.value, wrap(Data()))
    assert note.startswith("stoker: while loading sample 7")
    assert note.endswith("in the transform Halve")
    if sys.version_info >= (3, 11):
        assert note in e.value.__notes__


def test_the_file_is_named() -> None:
    with pytest.raises(ValueError, match="odd") as e:
        Subset(Data(), [3, 7])[1]
    assert "sample 1 (photos/7.jpg), in the transform Halve" in explain(e.value, Subset(Data(), [3, 7]))


def test_an_error_elsewhere_has_nothing_to_say() -> None:
    with pytest.raises(KeyError) as e:
        {}[1]
    assert explain(e.value, Data()) == ""


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from range(6)


def test_a_stream_is_read_once() -> None:
    assert len(list(stoker.DataLoader(Stream(), num_workers=2, debug=True))) == 6


@pytest.mark.slow
def test_a_script_that_nobody_edited(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import os, sys
        from torch.utils.data import DataLoader, Dataset
        class Data(Dataset):
            def __len__(self): return 8
            def __getitem__(self, i):
                if i == 5 and len(sys.argv) > 1: raise ValueError("broken")
                return os.getpid()
        if __name__ == "__main__":
            pids = [int(p) for batch in DataLoader(Data(), batch_size=2, num_workers=2) for p in batch]
            print(set(pids) == {os.getpid()})
        """)
    )
    line = [sys.executable, "-m", "stoker", "run", "--debug", "train.py"]
    p = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert p.returncode == 0, p.stderr
    assert p.stdout == "True\n"
    p = subprocess.run([*line, "fail"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert p.returncode == 1
    assert "Original Traceback" not in p.stderr
    if sys.version_info >= (3, 11):
        assert "while loading sample 5" in p.stderr
    line.insert(-1, "--apply")
    p = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert p.returncode == 2
    assert "it cannot be combined with --apply" in p.stderr
