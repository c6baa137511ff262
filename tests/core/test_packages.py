"""Whose code a file is: no folder is known by its name."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import stoker
from stoker.core import packages
from stoker.core.stacks import decoder
from stoker.staging.executed_code import is_closed

NAMES = ["stoker", "multiprocessing", "torch/utils/data", "site-packages", "dist-packages", "PIL", "av", "lib/python3"]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_the_users_is_the_users_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / name / "script.py")
    assert packages.is_users(path)
    assert decoder(path) == ""


def test_what_is_installed_is_not_the_users() -> None:
    from PIL import Image

    for file in (stoker.__file__, torch.__file__, pytest.__file__, json.__file__, queue.__file__, "<string>"):
        assert not packages.is_users(file)
    assert packages.in_stdlib(json.__file__)
    assert not packages.in_stdlib(pytest.__file__)
    assert decoder(Image.__file__) == "PIL"
    assert decoder(os.path.join(os.path.dirname(json.__file__), "decoder.py")) == "json"
    assert decoder(json.__file__) == ""


def test_packages_in_another_folder_of_the_path_are_installed(tmp_path: Path) -> None:
    """As with PYTHONPATH=/shared/packages; what lies beside the script is not, whatever else lies there."""
    code = "import sys; from stoker.core import packages as paths; print([paths.is_users(sys.argv[1]), paths.is_users(__file__)])"
    (tmp_path / "shared" / "thing-1.dist-info").mkdir(parents=True)
    (tmp_path / "mine" / "thing-1.dist-info").mkdir(parents=True)
    (tmp_path / "mine" / "script.py").write_text(code)
    path = os.pathsep.join([str(tmp_path / "shared"), *filter(None, [os.environ.get("PYTHONPATH")])])
    line = [sys.executable, str(tmp_path / "mine" / "script.py"), str(tmp_path / "shared" / "thing.py")]
    out = subprocess.run(line, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60)
    assert out.stdout == "[False, True]\n", out.stderr


SCRIPT = """
import multiprocessing, sys, threading
import stoker

class Data:
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return self.load(i)
    def load(self, i):
        if sys.argv[1] == "raises":
            raise ValueError("odd")
        if sys.argv[1] == "queue":
            multiprocessing.Queue().get()
        if sys.argv[1] == "threads":
            threading.Thread(target=elsewhere, daemon=True).start()
        threading.Event().wait()

def elsewhere():
    threading.Event().wait()

if __name__ == "__main__":
    hangs = sys.argv[1] != "raises"
    try:
        next(iter(stoker.DataLoader(Data(), num_workers=1, sample_timeout=1.0 if hangs else None)))
    except Exception as e:
        print(e)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "queue", "threads"])
def test_the_frames_of_a_script_in_folders_called_stoker_and_multiprocessing(how: str, tmp_path: Path) -> None:
    script = tmp_path / "stoker" / "multiprocessing" / "script.py"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT)
    out = subprocess.run([sys.executable, script, how], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    frames = [line for line in out.stdout.splitlines() if line.startswith('  File "')]
    own = [line.rpartition(" in ")[2] for line in frames if str(script) in line]
    assert own == (["__getitem__", "load"] if how == "raises" else ["load", "__getitem__"]), out.stdout + out.stderr
    assert not [line for line in frames if packages.PACKAGE in line]


@pytest.mark.slow
def test_this_suite_passes_in_a_folder_called_stoker(tmp_path: Path) -> None:
    """``git clone`` makes such a folder. These are the tests that read paths."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        pytest.skip("not in a checkout")
    copy = tmp_path / "stoker"
    ignored = shutil.ignore_patterns("__pycache__", "data", ".*")
    for name in ("src", "tests"):
        shutil.copytree(root / name, copy / name, ignore=ignored)
    shutil.copy(root / "pyproject.toml", copy)
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-n0",
        "-p",
        "no:cacheprovider",
        "tests/workers/faults/test_errors.py",
        "-k",
        "is_of_its_type and process",
    ]
    env = {**os.environ, "PYTHONPATH": str(copy / "src")}
    out = subprocess.run(line, env=env, capture_output=True, text=True, timeout=180, cwd=copy)
    assert out.returncode == 0, out.stdout + out.stderr


@pytest.mark.parametrize("folder", [packages.PACKAGE, packages.STDLIB])
def test_a_folder_whose_name_begins_alike_is_another(folder: str) -> None:
    beside = folder.rstrip(os.sep) + "-mine" + os.sep + "script.py"
    assert packages.is_users(beside)
    assert not is_closed(types.FunctionType(compile("1", beside, "eval"), {"__name__": "script"}))
