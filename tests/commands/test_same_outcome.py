"""A script ends under ``stoker run --apply`` as it does without: the same exit code, the same output."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.workers.can_start import _unguarded

from .helpers import LIMIT_S, stoker

SCRIPT = """
import multiprocessing as mp
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __init__(self, of):
        self.of = of
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep(0.005)
        return torch.full((8,), float(i))

def train():
    loaders = (
        DataLoader(Data(None), batch_size=8),
        DataLoader(Data(lambda: 0), batch_size=8),  # cannot be pickled
    )
    for epoch in range(2):
        for loader in loaders:
            print(epoch, sum(float(x.sum()) for x in loader), flush=True)

def main():
    {method}
    if {daemon}:
        child = mp.Process(target=train, daemon=True)
        child.start()
        child.join()
        print("exit code", child.exitcode)
    else:
        train()

{guard}main()
"""
GUARDS = {True: 'if __name__ == "__main__": ', False: ""}
METHODS = {method: f"mp.set_start_method({method!r})" for method in ("fork", "spawn", "forkserver")}
# As from Python 3.14 on, where nobody has set one.
METHODS["default"] = (
    "c = mp.context._default_context; c._actual_context = None; c._default_context = mp.get_context('forkserver'); "
    "mp.get_all_start_methods = lambda: ['forkserver', 'spawn', 'fork']"
)
MATRIX = [  # daemon, guard
    ("fork", False, True),
    ("fork", True, False),
    ("spawn", False, True),
    ("forkserver", False, False),
    ("forkserver", True, True),
    ("default", False, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "daemon", "guard"), MATRIX)
def test_start_methods(tmp_path: Path, method: str, daemon: bool, guard: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(method=METHODS[method], daemon=daemon, guard=GUARDS[guard]))
    line = [sys.executable, str(path)]
    plain = subprocess.run(line, cwd=tmp_path, text=True, capture_output=True, timeout=LIMIT_S)
    applied = stoker(tmp_path, "--apply", path)
    assert (applied.returncode, applied.stdout) == (plain.returncode, plain.stdout), applied.stderr
    assert "left unchanged" not in applied.stderr
    report = json.loads((tmp_path / "stoker-report.json").read_text())
    lines = path.read_text().split("\n")
    entries = report["applied"]["settings"]
    for text, pickles in (("Data(None)", True), ("Data(lambda: 0)", False)):
        number = next(k for k, line in enumerate(lines, 1) if text in line)
        counts = [x["to"]["num_workers"] for name, x in entries.items() if name.endswith(f":{number}")]
        may = not daemon and (method == "fork" or (guard and pickles))
        assert all(n == 0 for n in counts) or may, "what may not be"
        assert any(counts) or not may, f"what may be: {entries}"


@pytest.mark.slow
def test_advice_is_none_that_would_end_the_script(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(method=METHODS["fork"], daemon=True, guard=GUARDS[True]))
    assert stoker(tmp_path, path).returncode == 0
    findings = json.loads((tmp_path / "stoker-report.json").read_text())["findings"]
    fixes = [f["fix"] for f in findings if f["cause"] == "main_process_loading"]
    assert fixes, findings
    assert all("daemonic" in fix for fix in fixes), fixes
    assert not any("num_workers" in f["change"] for f in findings)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nif __name__ == '__main__':\n    main()", [1]),
        ("if '__main__' == __name__ and os.name:\n    main()\nelse:\n    x = 1", [4]),
        ("if __name__ == '__main__' or x:\n    main()", [2]),
        ("try:\n    import a\nexcept E:\n    a = 1\nfinally:\n    b = 2\nmain()", [2, 6, 4, 7]),
        ("with f() as x:\n    if __name__ == '__main__':\n        main()\n    y = x", [4]),
    ],
)
def test_what_an_import_runs(source: str, lines: list[int]) -> None:
    assert [statement.lineno for statement in _unguarded(ast.parse(source).body)] == lines
