"""What follows from findings: a diff of the user's own file."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.diagnosis.report import patch
from stoker.diagnosis.report.schema import Finding

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
    after = patch.edited(before.encode(), 1, {"num_workers": 2}).decode()
    assert after == (CALLS[before] or before)


@given(st.sampled_from([c for c, after in CALLS.items() if after]), st.text("\n#abc ", max_size=20), st.integers(0, 3))
def test_an_edited_file_is_the_same_but_for_the_keyword(call: str, head: str, more: int) -> None:
    head = "".join(f"# {line}\n" for line in head.split("\n"))
    settings = {"num_workers": 3, **{f"extra_{i}": True for i in range(more)}}
    source = (head + call + "\ny = 1\n").encode()
    tree = ast.parse(patch.edited(source, head.count("\n") + 1, settings))
    (made,) = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and patch._call(n, n.lineno) is n)
    assert {k.arg: ast.literal_eval(k.value) for k in made.keywords if k.arg in settings} == settings
    assert ast.unparse(tree).endswith("y = 1")


@pytest.mark.parametrize("head", ["", "\f\n", "'page \f break, \x1c and \u2028 are no ends of lines'\n"])
def test_a_diff_applies(tmp_path: Path, head: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"{head}a = 1\nx = DataLoader(d)\nb = 2\nz = DataLoader(\n    e, batch_size=8\n)"
    )  # no newline at the end
    line = 2 + bool(head)
    found = [
        Finding("too_few_workers", 0.5, loader=f"{script}:{line}", change={"num_workers": 2}),
        Finding("main_process_loading", 0.4, loader=f"{script}:{line}", change={"num_workers": 4}),
        Finding("worker_startup", 0.3, loader=f"{script}:{line + 2}", change={"persistent_workers": True}),
        Finding("slow_collate", 0.2, loader=f"{script}:{line + 2}"),
    ]
    text = patch.of(patch.changes(found))
    p = subprocess.run(
        ["git", "apply", "--unsafe-paths", "-p1", "--directory=/"], cwd="/", input=text.encode(), check=False
    )
    if p.returncode:  # some gits do not leave their folder; patch(1) does
        subprocess.run(["patch", "-p1", "-d", "/"], input=text.encode(), check=True)
    assert script.read_text() == (
        f"{head}a = 1\nx = DataLoader(d, num_workers=2)\nb = 2\nz = DataLoader(\n    e, batch_size=8, persistent_workers=True\n)"
    )


@pytest.mark.parametrize("tool", [["git", "apply", "-p1"], ["patch", "-p1"]], ids=["git", "patch"])
def test_a_diff_of_a_file_with_a_space_in_its_name_applies(tool: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    if shutil.which(tool[0]) is None:
        pytest.skip(f"there is no {tool[0]}")
    monkeypatch.chdir(tmp_path)
    Path("my train.py").write_text("x = DataLoader(d)\n")
    text = patch.of({"my train.py:1": {"num_workers": 2}})
    subprocess.run(tool, input=text.encode(), check=True, cwd=tmp_path)
    assert Path("my train.py").read_text() == "x = DataLoader(d, num_workers=2)\n"


def test_a_name_that_would_break_the_diff_has_none(tmp_path: Path) -> None:
    path = tmp_path / "a\nb.py"
    path.write_text("x = DataLoader(d)\n")
    assert patch.of({f"{path}:1": {"num_workers": 2}}) == ""


@pytest.mark.parametrize("name", ["gone.py:3", "?", "ipython-input-1:2", "DataLoader of Rows", ""])
def test_where_there_is_no_file_there_is_no_diff(name: str) -> None:
    assert patch.of({name: {"num_workers": 2}}) == ""


def test_a_file_that_is_no_python(tmp_path: Path) -> None:
    for i, text in enumerate([b"x = DataLoader(", b"\xff\xfe", b""]):
        path = tmp_path / f"{i}.py"
        path.write_bytes(text)
        assert patch.of({f"{path}:1": {"num_workers": 2}}) == ""


TRAIN = b"""import os
from torch.utils.data import DataLoader as Loader, Dataset
from torch.utils.data import DataLoader

import numpy as np

def main():
    a = DataLoader(Photos(1), batch_size=8, shuffle=True)
    b = DataLoader(dataset=photos, num_workers=1)
    c = InfiniteDataLoader(photos)
"""


def test_what_apply_did_is_a_diff(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(TRAIN)
    change = {"staged": True, "num_workers": 2, "engine": "stoker"}
    text = patch.of({f"{script}:{line}": change for line in (8, 9, 10)})
    added = [line[1:].strip() for line in text.splitlines() if line[:1] == "+" and line[:3] != "+++"]
    assert added == [
        "import stoker",
        "a = stoker.DataLoader(stoker.Staged(Photos(1)), batch_size=8, shuffle=True, num_workers=2)",
        "b = stoker.DataLoader(dataset=stoker.Staged(photos), num_workers=2)",
        "c = InfiniteDataLoader(stoker.Staged(photos), num_workers=2)",  # not torch's class: it stays
    ]
    assert "\n+import stoker\n" in text
    p = subprocess.run(["patch", "-p1", "-d", "/"], input=text.encode(), capture_output=True)
    assert p.returncode == 0, p.stdout
    assert script.read_text().splitlines()[5] == "import stoker"
    again = patch.edited(script.read_bytes(), 9, {"num_workers": 2})
    assert patch._importing(again) == again  # once is enough


def test_lines_end_where_a_file_s_lines_end(tmp_path: Path) -> None:
    """Not at a form feed, which ``str.splitlines`` takes for an end."""
    script = tmp_path / "old.py"
    script.write_text("a = 1\n\x0c\nb = 'x\u2028y'\nx = DataLoader(d)\n")
    text = patch.of({f"{script}:4": {"num_workers": 2}})
    p = subprocess.run(["patch", "-p1", "-d", "/"], input=text.encode(), capture_output=True)
    assert p.returncode == 0, (p.stdout, text)
    assert b"offset" not in p.stdout
    assert script.read_text().endswith("x = DataLoader(d, num_workers=2)\n")
