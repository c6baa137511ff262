"""Caches on disk: something is edited between two runs, which matters for one sample in twelve. The next run sees it by
its key, before it serves anything; the samples that are made again and compared (``COMPARED``) are switched off."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
RUN = """
import sys, warnings, torch, stoker
from stoker.staging import change_watch, open_store
change_watch.COMPARED = 0
open_store.differing_sample = lambda *_: (None, False)
sys.dont_write_bytecode = True
import data
warnings.simplefilter("ignore")
with_cache = sys.argv[1] != "plain"
asked = data.Data("files")
asked = stoker.Staged(asked, cache="disk", cache_dir="cache") if with_cache else asked
found = asked.account.filled if with_cache else 0
print(sum(float(asked[i].sum()) * (i + 1) for i in range(24)), found)
"""
HEAD = "import os, torch\n"
BODY = """
class Data(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.folder = folder
    def __len__(self):
        return 24
    def value(self, i):
        with open(os.path.join(self.folder, "deep", "er", f"{i}.txt")) as file:
            return torch.full((3,), float(file.read()))
    def __getitem__(self, i):
        %s
"""
PREP = "def prep(x, rare): return x * (0.5 if rare else 1)\n"
EDIT = ("0.5", "0.25")


def sources(call: str, head: str = "", **others: str) -> dict[str, str]:
    files = {"data.py": HEAD + head + BODY % call.replace("; ", "\n        ")}
    return files | {
        name.replace("of_pkg", "pkg/__init__").replace("pkg_", "pkg/") + ".py": t for name, t in others.items()
    }


CHAIN = """
class Ops:
    @classmethod
    def prep(cls, x, rare): return x * cls.factor(rare)
    @classmethod
    def factor(cls, rare): return 0.5 if rare else 1
"""
MADE = """
class Ops:
    def __init__(self, rare): self.k = 0.5 if rare else 1
    def __call__(self, x): return x * self.k
"""
RARE = "i % 12 == 7"
CASES: dict[str, tuple[dict[str, str], str]] = {  # sources, which of them is edited
    "class methods": (sources(f"return Ops.prep(self.value(i), {RARE})", CHAIN), "data.py"),
    "constructor": (sources(f"return Ops({RARE})(self.value(i))", MADE), "data.py"),
    "import of an import": (
        sources(f"import late; return late.prep(self.value(i), {RARE})", late="from later import prep\n", later=PREP),
        "later.py",
    ),
    "constant of a package": (
        sources(f"return self.value(i) * (pkg.k.K if {RARE} else 1)", "import pkg.k\n", of_pkg="", pkg_k="K = 0.5"),
        "pkg/k.py",
    ),
    "closure": (
        sources(
            f"return PREP(self.value(i), {RARE})",
            "def make(k): return lambda x, rare: x * (k if rare else 1)\nPREP = make(0.5)\n",
        ),
        "data.py",
    ),
}


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], list[str]]:
    """Runs ``RUN`` in a child of this process, to which the modules of the user are new."""
    folder = tmp_path / "files" / "deep" / "er"
    folder.mkdir(parents=True)
    for i in range(24):
        (folder / f"{i}.txt").write_text(f"{i + 1:4}")

    def once(how: str) -> list[str]:
        if (tmp_path / "late.py").exists():  # samples import, which runs a hook of pytest's in a child
            line = [sys.executable, "-c", RUN, how]
            return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120).stdout.split()
        printed = tmp_path / "printed"
        pid = os.fork()
        if pid == 0:
            signal.alarm(120)
            try:
                os.chdir(tmp_path)
                sys.path.insert(0, str(tmp_path))
                sys.argv = ["run.py", how]
                with printed.open("w") as out, contextlib.redirect_stdout(out):
                    exec(RUN, {"__name__": "__main__"})
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        return printed.read_text().split()

    return once


def check(run: Callable[[str], list[str]], edit: Callable[[], None]) -> None:
    before, filled = run("fill")
    assert filled == "0"
    assert run("again") == [before, "24"]
    edit()
    after, _ = run("plain")
    assert after != before
    assert run("last") == [after, "0"]


@pytest.mark.parametrize("name", CASES)
def test_edited_code_is_run(name: str, run: Callable[[str], list[str]], tmp_path: Path) -> None:
    files, edited = CASES[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    path = tmp_path / edited
    check(run, lambda: path.write_text(path.read_text().replace(*EDIT)) and None)


@pytest.mark.parametrize("how", ["written", "same size and time"])
def test_edited_files_are_read(how: str, run: Callable[[str], list[str]], tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(HEAD + BODY % "return self.value(i)")
    path = tmp_path / "files" / "deep" / "er" / "7.txt"

    def edit() -> None:
        found = path.stat()
        path.write_text(" 999" if how != "written" else "12345")
        if how != "written":
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))

    check(run, edit)


CHANGES_UNSEEN = """
import ctypes, time, torch
hidden = torch.zeros(1, dtype=torch.float64)
class Data(torch.utils.data.Dataset):
    def __init__(self, address):
        self.address = address
    def __len__(self):
        return 400
    def __getitem__(self, i):
        x = torch.full((64,), float(i))
        for _ in range(200):
            x = x.exp().log()
        return x + ctypes.c_double.from_address(self.address).value
def started_anew(worker):
    print(end="")

loader = torch.utils.data.DataLoader(Data(hidden.data_ptr()), batch_size=20, num_workers=2, worker_init_fn=started_anew)
for epoch in range(4):
    sums = [float(batch.sum()) for batch in loader]
    hidden += 1  # no digest sees it
print("ended")
"""


@pytest.mark.parametrize("how", ["warn", "stop"])
def test_a_mismatch_stands_first_in_the_report_and_may_end_the_run(how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHANGES_UNSEEN)
    line = [sys.executable, "-m", "stoker", "run", "--apply", "--on-mismatch", how, "train.py"]
    p = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (p.returncode, "ended" in p.stdout) == ((0, True) if how == "warn" else (1, False)), p.stderr
    assert "differs from when it was cached" in p.stderr
    assert ("StaleCacheError" in p.stderr) == (how == "stop")
    first = json.loads((tmp_path / "stoker-report.json").read_text())["findings"][0]
    assert first["cause"] == "stale_cache"
    assert "epochs 1 to 2 may have had stale samples" in first["fix"]
