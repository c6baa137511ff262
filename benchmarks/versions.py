"""Which torch and Python the tests pass with: ``python -m benchmarks.versions run|table``.

``run`` makes an environment for each pair in ``PLAN`` (``.venv-versions/TORCH-pyPYTHON``, some gigabytes for a CUDA
build) and runs folders of tests in it, one after the other. Nothing is installed into the checkout. The file of results
has a line for each folder, which a later run replaces, or one that says why a pair could not be had. ``table`` prints
what stands in docs/versions.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from stoker.core import resources
from stoker.core.files import write

from .versions_table import TESTS, cell, read, table

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".venv-versions"
KEPT = ROOT / "benchmarks" / "results" / "2026-11-25-versions.jsonl"
TOOLS = ("hypothesis", "jinja2", "pillow", "pytest", "pytest-timeout")
PLAN = {  # Pythons by torch; those that a release has no build for are left out
    "2.15.0": ("3.11", "3.12", "3.13", "3.14"),
    "2.13.0": ("3.11", "3.10", "3.12", "3.13", "3.14"),
    "2.12.1": ("3.11",),
    "2.8.0": ("3.11", "3.10", "3.13"),
    "2.4.1": ("3.11", "3.10", "3.12"),
}
LIMIT_S = 3600  # for one folder of tests
ABOUT = "import platform, sys, torch; print(platform.python_version(), torch.__version__)"
FITS = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"


def pythons() -> dict[str, str]:
    """An interpreter for each version of Python that runs here, on PATH or under pyenv."""
    found: dict[str, str] = {}
    under = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    wanted = sorted({python for several in PLAN.values() for python in several})
    for path in (*(f"python{v}" for v in wanted), *sorted(map(str, under.glob("3.*/bin/python")))):
        try:  # not only found: a shim may stand on PATH for a Python that is not there
            p = subprocess.run([path, "-c", FITS], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        found.setdefault(p.stdout.strip(), path)
    return {version: found[version] for version in wanted if version in found}


def installed(folder: Path, interpreter: str, torch: str) -> str:
    """Makes an environment unless it is there. Returns why it could not be made, or ""."""
    needs = re.search(r"(?m)^dependencies = (\[.*\])$", (ROOT / "pyproject.toml").read_text())
    assert needs is not None
    wanted = [f"torch=={torch}", *(n for n in json.loads(needs[1]) if not n.startswith("torch")), *TOOLS]
    stamp = folder / ".ready"
    if stamp.exists() and stamp.read_text() == " ".join(wanted):
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        constraints.write("\n".join(pin for pin in pins if not pin.startswith("torch=")))
        constraints.flush()
        line = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted]
        # In the environment, not as -c: it takes the place of constraints elsewhere, which may be about torch.
        p = subprocess.run(line, env={**os.environ, "PIP_CONSTRAINT": constraints.name}, capture_output=True, text=True)
    if p.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        return next((s for s in reversed(p.stderr.splitlines()) if s.startswith("ERROR")), p.stderr[-300:]).strip()
    stamp.write_text(" ".join(wanted))
    return ""


def versions_in(folder: Path) -> dict[str, str]:
    """Of Python and of the build of torch in an environment; ``failure`` where torch cannot be imported."""
    line = [str(folder / "bin" / "python"), "-W", "ignore", "-c", ABOUT]
    p = subprocess.run(line, capture_output=True, text=True)
    if p.returncode:
        return {"failure": f"import torch: {p.stderr.strip().splitlines()[-1]}"}
    return dict(zip(("version", "build"), p.stdout.split(), strict=True))


def tried(folder: Path, tests: str) -> dict[str, Any]:
    """Runs a folder of tests in an environment, and counts."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        line = [str(folder / "bin" / "python"), "-W", "ignore", "-m", "pytest", "-p", "no:cacheprovider"]
        line += [f"--junitxml={report}", "--disable-warnings", f"tests/{tests}"]
        line += ["--tb=native"]  # CPython 3.11.7 may fail to parse the source for pytest's own (gh-106905)
        line += ["--timeout-method=signal"]  # a test that hangs has failed, and the others run
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HYPOTHESIS_STORAGE_DIRECTORY": scratch}
        try:
            p = subprocess.run(line, cwd=ROOT, env=env, timeout=LIMIT_S, stdout=sys.stderr)
        except subprocess.TimeoutExpired:
            return {"failure": f"longer than {LIMIT_S} s"}
        if not report.exists():
            return {"failure": f"pytest ended with exit code {p.returncode}"}
        return counted(next(ElementTree.parse(report).getroot().iter("testsuite")))


def counted(suite: ElementTree.Element) -> dict[str, Any]:
    """Numbers of a JUnit report, and the names of tests that failed."""
    failures = [
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = int(suite.get("skipped", 0))
    passed = int(suite.get("tests", 0)) - len(failures) - skipped
    return {
        "passed": passed,
        "failed": len(failures),
        "skipped": skipped,
        "failures": failures,
        "seconds": round(float(suite.get("time", 0))),
    }


def run(a: argparse.Namespace) -> int:
    found = pythons()
    platform = resources.read().platform
    wanted = [(t, p) for t, several in PLAN.items() for p in several]
    if a.only:
        wanted = [(t, p) for t, _, p in (pair.partition("-py") for pair in a.only.split(","))]
    good = True
    for torch, python in wanted:
        folder = ENVIRONMENTS / f"{torch}-py{python}"
        about = {"torch": torch, "python": python, "platform": platform}
        why = f"no Python {python} here" if python not in found else installed(folder, found[python], torch)
        if why:
            keep(a.json, {**about, "tests": None, "not_installed": why})
            continue
        about |= versions_in(folder)
        for tests in a.tests.split(","):
            line = {**about, "tests": tests, **({} if "failure" in about else tried(folder, tests))}
            keep(a.json, line)
            good = good and "failure" not in line and not line["failed"]
        if a.drop:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


def keep(path: Path, line: dict[str, Any]) -> None:
    """Adds a line to a file of results, in the place of an earlier one of the same pair and tests, and prints it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pair = line["torch"], line["python"]
    others = [old for old in read(path) if (old["torch"], old["python"]) != pair]
    same = [old for old in read(path) if (old["torch"], old["python"]) == pair]
    if line["tests"] is not None:  # it could be installed, so the others of the pair stay
        others += [old for old in same if old["tests"] not in (None, line["tests"])]
    write(path, "".join(json.dumps(each) + "\n" for each in (*others, line)))
    said = line.get("not_installed") or f"{line['tests']}: {cell([line])}"
    print(f"torch {pair[0]}, Python {pair[1]}: {said}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="make environments, run the tests, keep a line for each")
    runs.add_argument("--only", help="pairs, as in 2.15.0-py3.11,2.4.1-py3.10")
    runs.add_argument("--tests", default=",".join(TESTS), help="folders of tests (default: %(default)s)")
    runs.add_argument("--drop", action="store_true", help="remove each environment after its tests: they are large")
    runs.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "local" / "versions.jsonl")
    shown = commands.add_parser("table", help="the matrix, as Markdown")
    shown.add_argument("json", type=Path, nargs="?", default=KEPT)
    a = parser.parse_args()
    if a.command == "run":
        return run(a)
    print(table(read(a.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
