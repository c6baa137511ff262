"""Whether staging pays is said before, by ``stoker run``, and ``--apply`` does it without changing a batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.diagnosis.doctor.verdict import diagnose
from tests.diagnosis.helpers import entry, fields

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


@pytest.mark.slow
def test_an_observed_run_does_not_call_the_dataset(tmp_path: Path) -> None:
    """Each sample is asked for once an epoch, in the script's own workers, and by nobody else."""
    path, report = tmp_path / "train.py", tmp_path / "report.json"
    count = "def __getitem__(self, i):\n        os.write(fd, b'%d\\n' % os.getppid())\n"
    head = f"import os\nfd = os.open({str(tmp_path / 'calls')!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY)\n"
    path.write_text(head + SCRIPT.format(epochs=3).replace("def __getitem__(self, i):\n", count))
    _, seen = run(path, report)
    parents = (tmp_path / "calls").read_text().split()
    assert len(parents) == 3 * 400
    assert len(set(parents)) == 1
    (found,) = (f for f in seen["findings"] if f["cause"] == "cacheable_prefix")
    assert found == seen["findings"][0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wait_s": 9.0, "epochs": 4}, True),
        ({"wait_s": 9.0, "epochs": 1}, False),
        ({"wait_s": 0.1, "epochs": 4}, False),
        ({"wait_s": 9.0, "epochs": 4, "settings": {"iterable": True}}, False),
        ({"wait_s": 9.0, "epochs": 4, "settings": {"applied": True}}, False),
    ],
    ids=["starved", "one epoch", "nobody waits", "a stream", "tried in this run"],
)
def test_the_rule(changes: dict[str, Any], said: bool) -> None:
    loader = entry(**{"stages": {**fields()["stages"], "fetch": {"self_s": 18.0}}, **changes})
    _, findings = diagnose([loader], 2, False)
    mine = [f for f in findings if f.cause == "cacheable_prefix"]
    assert bool(mine) == said
    if mine:
        assert findings[0] == mine[0]  # it may bring most
        assert mine[0].predicted_speedup is None  # how much of a sample is the same is not known
        assert "--apply tries" in mine[0].fix
