"""Whether staging pays is said before, by ``stoker run``, and ``--apply`` does it without changing a batch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker import worth
from stoker.doctor.verdict import diagnose
from stoker.report import diff

from .test_doctor import entry

SCRIPT = """
import time, torch
from torch.utils.data import DataLoader, Dataset

class Noise:
    def __call__(self, x):
        return x + torch.rand(x.shape)

class Compose:
    def __init__(self, transforms):
        self.transforms = transforms
    def __call__(self, x):
        for t in self.transforms:
            x = t(x)
        return x

def slow(x):
    time.sleep(0.002)
    return x.float()

class Data(Dataset):
    transform = Compose([slow, Noise()])
    def __len__(self):
        return 400
    def __getitem__(self, i):
        return self.transform(torch.full((8,), i)), i

if __name__ == "__main__":
    torch.manual_seed(0)
    total = 0.0
    data = Data()
    for epoch in range({epochs}):
        for x, y in DataLoader(data if epoch % 2 else Data(), batch_size=20, shuffle=True, num_workers=1):
            total += float((x * (y + 1)[:, None]).double().sum())
    print("total", total)
"""


def run(path: Path, report: Path, *more: str) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, "-m", "stoker", "run", "--json", str(report), *more, str(path)]
    p = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=path.parent)
    assert p.returncode == 0, p.stderr
    return p.stdout + p.stderr, json.loads(report.read_text())


def total(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("total"))


@pytest.mark.slow
def test_a_run_says_that_staging_pays_and_apply_does_it_to_the_bit(tmp_path: Path) -> None:
    path, report = tmp_path / "train.py", tmp_path / "report.json"
    path.write_text(SCRIPT.format(epochs=4))
    before, seen = run(path, report)
    (found,) = (f for f in seen["findings"] if f["cause"] == "cacheable_prefix")
    assert seen["findings"][-1] == found  # a remedy, behind the causes
    assert found["change"] == {"staged": True}
    assert found["evidence"]["samples"] == 400
    assert "slow" in found["evidence"]["border"]
    after, applied = run(path, report, "--apply")
    (settings,) = applied["applied"]["settings"].values()
    assert settings["to"]["staged"] is True, after
    assert "stoker.Staged(dataset)" in after
    assert total(before) != total(after) or settings["to"]["num_workers"] == 1  # another count seeds each task
    said = [line for line in after.splitlines() if line.startswith("stoker: ") and "is kept in memory" in line]
    assert len(said) == 1  # though the script makes its dataset anew


def test_one_epoch_is_not_worth_it(tmp_path: Path) -> None:
    path, report = tmp_path / "train.py", tmp_path / "report.json"
    path.write_text(SCRIPT.format(epochs=1))
    _, seen = run(path, report)
    assert not any(f["cause"] == "cacheable_prefix" for f in seen["findings"])


FOUND = {
    "samples": 1000,
    "sample_bytes": 1e4,
    "nbytes": 1e7,
    "free": 10**10,
    "prepare_s": 0.009,
    "augment_s": 0.001,
    "keep_s": 1e-5,
    "read_s": 1e-5,
    "border": "",
    "share": 1.0,
    "saved_s": 8.99,
    "fill_s": 9.0,
}


@pytest.mark.parametrize(
    ("found", "wait", "applied"),
    [
        (FOUND, 9.0, {"staged": True}),
        ({**FOUND, "share": 0.3}, 9.0, {}),  # said, but not done for the user
        ({**FOUND, "prepare_s": 0.0001, "augment_s": 0.0099}, 9.0, None),
        ({"why": "its __getitem__ draws"}, 9.0, None),
        ({}, 9.0, None),
        (FOUND, 0.1, None),  # nobody waits
    ],
    ids=["pays", "fits in part", "random part rules", "cannot be split", "not tried", "healthy"],
)
def test_the_rule(found: dict[str, Any], wait: float, applied: Any) -> None:
    stages = {**entry()["stages"], "fetch": {"self_s": 18.0}}
    loader = entry(wait_s=wait, stages=stages, epochs=4, cacheable=found)
    _, findings = diagnose([loader], 2, False)
    mine = [f for f in findings if f.cause == "cacheable_prefix"]
    assert [f.change for f in mine] == ([] if applied is None else [applied])
    if mine:
        assert findings[-1] == mine[0]
        assert mine[0].predicted_speedup is not None
        assert 1 < mine[0].predicted_speedup < 4


def test_a_setting_of_ours_is_no_argument_of_a_loader(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x = DataLoader(d)\n")
    assert diff.of({f"{path}:1": {"staged": True}}) == ""
    assert "num_workers=2" in diff.of({f"{path}:1": {"staged": True, "num_workers": 2}})


class Slow:
    def __len__(self) -> int:
        return 500

    def __getitem__(self, i: int) -> np.ndarray[Any, Any]:
        time.sleep(0.002)
        return np.zeros(1000, np.uint8)


def test_worth_says_what_it_costs_and_brings() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    found = worth(Slow())
    assert torch.equal(before, torch.get_rng_state())
    assert found.nbytes == 500_000
    assert found.saved_s > 0.9
    assert found.fill_s >= found.saved_s
    assert found.epochs < 0.5
    assert "pays" in str(found)
    assert worth(stoker.Staged(Slow(), prepare=lambda x: x)).samples == 500
