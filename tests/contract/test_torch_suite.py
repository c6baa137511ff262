"""The runner of torch's own tests, on a file of two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import torch.utils.data as data

def test_alike():
    assert list(data.DataLoader([1, 2], num_workers=1)) == [1, 2]

def test_whose():
    assert data.DataLoader.__module__.startswith("torch.")
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tests.contract.torch_suite", *words]
    return subprocess.run(line, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=180)


@pytest.mark.slow
def test_says_which_end_in_another_way(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    p = run(str(file), "--json")
    assert p.returncode == 1, p.stderr
    said = json.loads(p.stdout)
    ends = {"torch": "passed", "stoker.DataLoader": "failure", "stoker.install()": "passed"}
    assert said == {"tests": 2, "other": {"test_some.test_whose": ends}, "worse": ["test_some.test_whose"]}


@pytest.mark.slow
def test_says_that_nothing_ran(tmp_path: Path) -> None:
    (tmp_path / "test_none.py").write_text("")
    assert run(str(tmp_path / "test_none.py")).returncode == 2
    assert run(str(tmp_path / "no.py")).returncode == 2
