"""What follows from findings: a diff of the user's own file, and a plain reading."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.report import diff, reading

from .test_doctor import entry

CALLS = {
    "x = DataLoader(d, num_workers=0)": "x = DataLoader(d, num_workers=2)",
    "x = DataLoader(d)": "x = DataLoader(d, num_workers=2)",
    "x = DataLoader(d, 4, True,)": "x = DataLoader(d, 4, True, num_workers=2,)",
    "x = torch.utils.data.DataLoader(dataset=f(d))": "x = torch.utils.data.DataLoader(dataset=f(d), num_workers=2)",
    "é = 'ü'; x = DataLoader('ö', num_workers=1 + 1)  # ß": "é = 'ü'; x = DataLoader('ö', num_workers=2)  # ß",
    "x = DataLoader(\n  d,\n  num_workers=0,\n)": "x = DataLoader(\n  d,\n  num_workers=2,\n)",
    "x = DataLoader(d, **options)": None,
    "x = DataLoader(*all)": None,
    "x = make_loader(d)": None,
    "x = DataLoader(d, 1, False, None, None, 0)": None,
    "x = DataLoader(d), DataLoader(e)": None,
}


@pytest.mark.parametrize("before", CALLS)
def test_a_call_is_edited_or_left_alone(before: str) -> None:
    after = diff.edited(before.encode(), 1, {"num_workers": 2}).decode()
    assert after == (CALLS[before] or before)


@given(st.sampled_from([c for c, after in CALLS.items() if after]), st.text("\n#abc ", max_size=20), st.integers(0, 3))
def test_an_edited_file_is_the_same_but_for_the_keyword(call: str, head: str, more: int) -> None:
    head = "".join(f"# {line}\n" for line in head.split("\n"))
    settings = {"num_workers": 3, **{f"extra_{i}": True for i in range(more)}}
    source = (head + call + "\ny = 1\n").encode()
    tree = ast.parse(diff.edited(source, head.count("\n") + 1, settings))
    (made,) = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and diff._call(n, n.lineno) is n)
    assert {k.arg: ast.literal_eval(k.value) for k in made.keywords if k.arg in settings} == settings
    assert ast.unparse(tree).endswith("y = 1")


def test_a_diff_applies(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "a = 1\nx = DataLoader(d)\nb = 2\nz = DataLoader(\n    e, batch_size=8\n)"
    )  # no newline at the end
    found = [
        {"cause": "too_few_workers", "loader": f"{script}:2", "change": {"num_workers": 2}},
        {"cause": "main_process_loading", "loader": f"{script}:2", "change": {"num_workers": 4}},
        {"cause": "worker_startup", "loader": f"{script}:4", "change": {"persistent_workers": True}},
        {"cause": "slow_collate", "loader": f"{script}:4", "change": {}},
    ]
    text = diff.of(diff.changes(found))
    p = subprocess.run(
        ["git", "apply", "--unsafe-paths", "-p1", "--directory=/"], cwd="/", input=text.encode(), check=False
    )
    if p.returncode:  # some gits do not leave their folder; patch(1) does
        subprocess.run(["patch", "-p1", "-d", "/"], input=text.encode(), check=True)
    assert script.read_text() == (
        "a = 1\nx = DataLoader(d, num_workers=2)\nb = 2\nz = DataLoader(\n    e, batch_size=8, persistent_workers=True\n)"
    )
    assert diff.of(diff.changes(found, done=["too_few_workers", "main_process_loading", "worker_startup"])) == ""


@pytest.mark.parametrize("name", ["gone.py:3", "?", "ipython-input-1:2", "DataLoader of Rows", ""])
def test_where_there_is_no_file_there_is_no_diff(name: str) -> None:
    assert diff.of({name: {"num_workers": 2}}) == ""


def test_a_file_that_is_no_python(tmp_path: Path) -> None:
    for i, text in enumerate([b"x = DataLoader(", b"\xff\xfe", b""]):
        path = tmp_path / f"{i}.py"
        path.write_bytes(text)
        assert diff.of({f"{path}:1": {"num_workers": 2}}) == ""


def said(*, gpu: float | None = None, busy: float = 1.5, waits: float = 0.5, **changes: Any) -> str:
    loader = entry(wait_s=waits, step_s=1 - waits, kernel={"cpu_ns": (busy - 0.1) * 1e9}, **changes)
    verdict = "input-bound" if waits > 0.1 else "healthy"
    around = {"gpu_busy": [] if gpu is None else [gpu]}
    found = [{"cause": "too_few_workers", "change": {"num_workers": 4}}]
    report = {"machine": {"cores": 4}, "around": around, "loaders": [loader], "verdict": verdict, "findings": found}
    return " ".join(reading.sentences(report))


def test_a_plain_reading() -> None:
    assert "the pipeline" in said(gpu=0.3, busy=2.5)
    assert "torch.compile" in said(gpu=0.95, waits=0.02)
    assert "launches" in said(gpu=0.3, waits=0.02)
    assert "too few workers" in said(busy=1.1)
    assert "all 4 cores" in said(busy=3.9)
    waits = [{"kind": "fetch", "name": "__getitem__", "line": "a.py:3", "ran": 0.1, "waited": 0.9}]
    idle: dict[str, Any] = {"worker": {"cpu_s": 0.1, "tasks": 100}}
    assert "disk" in said(busy=0.2, stages=idle, looks=100, where=waits)
    assert said(busy=0.2, stages=idle) == ""  # who else is on the machine may have had the cores
    assert said(busy=2.5) == ""
    assert said(busy=1.1, waits=0.02) == ""
    climbs = {"over_time": [[i, 1e8 * (1 + i)] for i in range(10)]}
    assert "climbed" in said(busy=2.5, waits=0.02, memory=climbs)
    assert reading.sentences({"machine": {}, "around": {}, "loaders": []}) == []
