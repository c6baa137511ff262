"""The harness sees what it is there for: each of these scripts does something else where stoker runs it."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from .harness import three_ways

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stoker run works on Linux only")

SCRIPT = """
    import os, subprocess, sys, tempfile
    print("epoch 1: content a")
    print("= order b")
    if "STOKER_RUN" not in os.environ:
        print("~ versions 3.000 of 10 samples")
    else:
        {does}
"""
SAME = "print('~ versions 2.900 of 10 samples')"
CASES = {
    "other content": ("print('epoch 2: content c'); " + SAME, "content c"),
    "frozen": ("print('~ versions 1.000 of 10 samples')", "1.0 versions of a sample, 3.0 without stoker"),
    "drawn otherwise": ("print('= more'); " + SAME, "observing changed what the script draws"),
    "exit code": (SAME + "; sys.exit(3)", "observed: 3"),
    "traceback": (SAME + "; print('Traceback (most recent call last):', file=sys.stderr)", "Traceback"),
    "process": (SAME + "; subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=-3, stderr=-3)", "sleep"),
    "file": (SAME + "; tempfile.mkdtemp(prefix='left_')", "observed leaves files"),
}


def script(tmp_path: Path, does: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT).format(does=does))
    return [str(path)]


def test_what_is_the_same_passes(tmp_path: Path) -> None:
    done = three_ways(script(tmp_path, SAME), tmp_path, tmp_path)
    assert [x.versions for x in done.values()] == [[3.0], [2.9], [2.9]]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_what_is_not_does_not(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.scripts.harness.PATIENCE_S", 1.0)
    does, words = CASES[name]
    with pytest.raises(AssertionError, match=words):
        three_ways(script(tmp_path, does), tmp_path, tmp_path)
