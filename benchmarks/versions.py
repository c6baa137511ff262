"""Which torch and Python the tests pass with: ``python -m benchmarks.versions run|table``.

``run`` makes an environment for each pair in ``PLAN`` (``.venv-versions/TORCH-pyPYTHON``, some gigabytes for a CUDA
build) and runs the contract tests and those of the engine in it, one pair after the other. Nothing is installed into
the checkout. A pair that cannot be had gets a line that says why. ``table`` prints what stands in docs/versions.md.
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

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".venv-versions"
KEPT = ROOT / "benchmarks" / "results" / "2026-11-25-versions.jsonl"
TESTS = ("contract", "core", "device", "loader", "sampling", "transport", "workers")
TOOLS = ("hypothesis", "jinja2", "pillow", "pytest", "pytest-timeout")
PLAN = {  # Pythons by torch; those that a release has no build for are left out
    "2.15.0": ("3.11", "3.12", "3.13", "3.14"),
    "2.13.0": ("3.11", "3.10", "3.12", "3.13", "3.14"),
    "2.12.1": ("3.11",),
    "2.8.0": ("3.11", "3.10", "3.13"),
    "2.4.1": ("3.11", "3.10", "3.12"),
}
LIMIT_S = 3600  # for the tests of one pair
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
    return found


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


def tried(folder: Path, tests: list[str]) -> dict[str, Any]:
    """Runs the tests in an environment, and counts."""
    python = str(folder / "bin" / "python")
    about = subprocess.run([python, "-W", "ignore", "-c", ABOUT], capture_output=True, text=True)
    if about.returncode:
        return {"failure": f"import torch: {about.stderr.strip().splitlines()[-1]}"}
    version, torch = about.stdout.split()
    out: dict[str, Any] = {"build": torch, "version": version, "tests": tests}
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        line = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HYPOTHESIS_STORAGE_DIRECTORY": scratch}
        env["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        try:
            p = subprocess.run(line, cwd=ROOT, env=env, timeout=LIMIT_S, stdout=sys.stderr)
        except subprocess.TimeoutExpired:
            return {**out, "failure": f"longer than {LIMIT_S} s"}
        if not report.exists():
            return {**out, "failure": f"pytest ended with exit code {p.returncode}"}
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    return {**out, **counted(suite)}


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
    machine = resources.read()
    wanted = [(t, p) for t, several in PLAN.items() for p in several]
    if a.only:
        wanted = [tuple(pair.split("-py")) for pair in a.only.split(",")]  # type: ignore[misc]
    failed = False
    for torch, python in wanted:
        folder = ENVIRONMENTS / f"{torch}-py{python}"
        line: dict[str, Any] = {"torch": torch, "python": python, "platform": machine.platform}
        why = f"no Python {python} here" if python not in found else installed(folder, found[python], torch)
        line |= {"not_installed": why} if why else tried(folder, [f"tests/{name}" for name in a.tests.split(",")])
        if a.drop:
            shutil.rmtree(folder, ignore_errors=True)
        failed = failed or bool(line.get("failed") or "failure" in line)
        a.json.parent.mkdir(parents=True, exist_ok=True)
        before = [old for old in read(a.json) if (old["torch"], old["python"]) != (torch, python)]
        write(a.json, "".join(json.dumps(each) + "\n" for each in (*before, line)))
        print(f"torch {torch}, Python {python}: {cell(line)}{why and f' ({why})'}", flush=True)
    return 1 if failed else 0


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cell(line: dict[str, Any] | None) -> str:
    """What the table says about one pair."""
    if line is None:
        return "not run"
    if "not_installed" in line:
        return "not installed"
    if "failure" in line:
        return str(line["failure"])
    names = ("passed", "failed", "skipped")
    return ", ".join(f"{line[name]} {name}" for name in names if line[name] or name == "passed")


def _key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def table(lines: list[dict[str, Any]]) -> str:
    """torch x Python, newest torch first, and below it what failed or could not be installed."""
    by_pair = {(line["torch"], line["python"]): line for line in lines}
    torches = sorted({t for t, _ in by_pair}, key=_key, reverse=True)
    columns = sorted({p for _, p in by_pair}, key=_key)
    full = {p: next((e["version"] for e in lines if e["python"] == p and "version" in e), p) for p in columns}
    out = [f"| torch | {' | '.join(f'Python {full[p]}' for p in columns)} |", "|---" * (len(columns) + 1) + "|"]
    out += [f"| {t} | {' | '.join(cell(by_pair.get((t, p))) for p in columns)} |" for t in torches]
    notes = [
        f"- torch {t}, Python {p}: {line['not_installed']}"
        if "not_installed" in line
        else f"- torch {t}, Python {p}: failed: {', '.join(f'`{name}`' for name in line['failures'])}"
        for (t, p), line in sorted(by_pair.items(), key=lambda e: (_key(e[0][0]), _key(e[0][1])), reverse=True)
        if "not_installed" in line or line.get("failures")
    ]
    return "\n".join([*out, *([""] if notes else []), *notes])


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
