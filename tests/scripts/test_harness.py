"""The harness sees what it is there for: what a run leaves, and each way in which one can differ from another."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from . import harness
from .harness import Outcome, run, three_ways

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stoker run works on Linux only")

LINES = ["epoch 1: content a", "= order b", "~ versions 3.000 of 10 samples"]
SAME = Outcome(0, [*LINES[:2], "~ versions 2.900 of 10 samples"], "")
# What a run under stoker did otherwise, and what is said of it.
CASES = {
    "other content": (replace(SAME, out=["epoch 1: content c", *SAME.out[1:]]), "content c"),
    "frozen": (replace(SAME, out=[*LINES[:2], "~ versions 1.000"]), "1.0 versions of a sample, 3.0 without stoker"),
    "drawn otherwise": (replace(SAME, out=[*SAME.out, "= more"]), "observing changed what the script draws"),
    "exit code": (replace(SAME, code=3), "observed: 3"),
    "traceback": (replace(SAME, err="Traceback (most recent call last):"), "Traceback"),
    "process": (replace(SAME, left=["17 sleep 60"]), "sleep 60"),
    "file": (replace(SAME, files=["left"]), "observed leaves files"),
}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    """What a script does in each way; nothing is run."""
    out = {"plain": Outcome(0, LINES, ""), "observed": SAME, "applied": SAME}
    monkeypatch.setattr(harness, "run", lambda way, *_: out[way])
    return out


def test_what_is_the_same_passes(runs: dict[str, Outcome], tmp_path: Path) -> None:
    done = three_ways("train.py", tmp_path, tmp_path)
    assert [x.versions for x in done.values()] == [[3.0], [2.9], [2.9]]


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_does_not(name: str, runs: dict[str, Outcome], tmp_path: Path) -> None:
    runs["observed"], words = CASES[name]
    with pytest.raises(AssertionError, match=words):
        three_ways("train.py", tmp_path, tmp_path)


def test_what_a_run_leaves_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "PATIENCE_S", 0.1)
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys, tempfile\n"
        "subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=-3, stderr=-3)\n"
        "tempfile.mkdtemp(prefix='left_')\n"
        "print('here'); print('there', file=sys.stderr); sys.exit(3)\n"
    )
    found = run("plain", [str(script)], tmp_path / "folder", {})
    assert (found.code, found.out, found.err, found.files) == (3, ["here"], "there\n", ["left"])
    (left,) = found.left
    assert left.endswith(" sleep 60")
