"""The benchmark runner: it runs, keeps what it measured, and computes what it prints. No speed is asserted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import cluster_peers, table, versions, versions_table
from benchmarks.peers import __main__ as peers
from benchmarks.peers import nodes
from benchmarks.scripts import __main__ as scripts

ROOT = Path(__file__).parent.parent


def benchmarks(*args: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "benchmarks", *args]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_quick_round(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    p = benchmarks(
        "run", "--quick", "--rounds", "1", "--workloads", "overhead", "--out", str(tmp_path), "--json", str(raw)
    )
    assert p.returncode in (0, 1), p.stderr
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    assert not any("failed" in line for line in lines)
    assert {line["contestant"] for line in lines[1:]} == {"stoker", "torch"}
    assert "overhead persistent" in p.stdout
    again = benchmarks("table", str(raw))
    assert again.returncode == 0
    assert again.stdout.strip() in p.stdout
    assert benchmarks("table", str(raw), "--markdown").stdout.startswith("| metric |")


def test_stored_results_name_no_folder_of_a_machine() -> None:
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json*")):
        found = re.findall(r"/(?:home|root|work|Users|tmp)/[^\s\"]*", path.read_text())
        assert not found, (path.name, found[:3])


@pytest.mark.slow
def test_wrong_usage(tmp_path: Path) -> None:
    assert benchmarks("run", "--workloads", "nothing").returncode == 2
    assert benchmarks("run", "--rounds", "0").returncode == 2
    assert benchmarks("table", str(tmp_path / "none")).returncode == 2
    assert benchmarks().returncode == 2


def line(metric: str, contestant: str, round_: int, epoch: int, value: float) -> dict[str, object]:
    return {"metric": metric, "contestant": contestant, "round": round_, "epoch": epoch, "value": value}


def test_ratios_are_turned_so_that_more_is_better() -> None:
    lines = []
    for r, (s, t) in enumerate([(8.0, 2.0), (9.0, 3.0), (10.0, 2.5)]):
        lines += [
            line("transport", "stoker", r, 1, 1.0),
            line("transport", "stoker", r, 2, s),
            line("transport", "torch", r, 2, t),
        ]
        lines += [line("startup fork: restart", "stoker", r, 1, t), line("startup fork: restart", "torch", r, 1, s)]
    fast, start = table.rows(lines)
    assert (fast.ratio, start.ratio) == (9 / 2.5, 9 / 2.5)
    assert fast.paired == start.paired == [4.0, 3.0, 4.0]
    assert not fast.met
    assert start.met
    assert "MISSED" in table.render(lines)


def test_a_failure_is_a_row() -> None:
    out = table.render([{"workload": "jpeg", "contestant": "stoker", "round": 0, "failed": "no photographs"}])
    assert "FAILED: no photographs" in out


def test_bare_limits_and_bounds_are_held_against_stoker_alone() -> None:
    lines = []
    for r, share in enumerate([0.80, 0.90, 0.86]):
        lines += [line("transport unread", "stoker", r, 2, 20 * share), line("transport unread", "limit", r, 1, 20.0)]
        lines += [line("transport unread", "torch", r, 2, 1.0)]
        lines += [line("resize 1 -> 4 -> 2: longest pause", "stoker", r, 1, 1.5 + r)]
    bare, pause = table.rows(lines)
    assert bare.share == 0.86
    assert bare.met
    assert pause.ratio is None
    assert not pause.met
    text = table.render(lines)
    assert "86% of 20" in text
    assert "cannot" in text
    assert "<= 2 batch times" in text


@pytest.mark.slow
def test_a_workload_with_its_own_measure_runs(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    p = benchmarks("run", "--quick", "--rounds", "1", "--workloads", "resize", "--json", str(raw))
    assert p.returncode in (0, 1), p.stderr
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    assert not any("failed" in line for line in lines), lines
    assert any(line.get("contestant") == "stoker" for line in lines)


def test_a_peer_that_is_not_there_is_said() -> None:
    lines = [
        {**line("overhead", c, 0, 2, v), "workload": "overhead"} for c, v in (("stoker", 5000.0), ("torch", 1000.0))
    ]
    lines += [{"contestant": "grain", "workload": "overhead", "round": 0, "absent": "not installed here"}]
    lines += [{"contestant": "spdl, Pillow", "workload": "overhead", "round": 0, "failed": "exit code 1"}]
    text = peers.render(lines)
    assert "| stoker | 5,000 | 5,000..5,000 | 5.00x |" in text
    assert "| grain | absent: not installed here | | |" in text
    assert "| spdl, Pillow | absent: failed: exit code 1 | | |" in text


@pytest.mark.slow
def test_a_peer_is_driven() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.drive", "torch", "overhead", "--epochs", "1"]
    p = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert json.loads(p.stdout)["metric"] == "overhead", p.stderr
    p = subprocess.run([sys.executable, "-m", "benchmarks.peers", "table", "none"], cwd=ROOT, capture_output=True)
    assert p.returncode == 2


def script_line(way: str, round_: int, wall: float, first: float, later: float) -> dict[str, object]:
    return {"script": "pil_compose", "way": way, "round": round_, "wall": wall, "first": first, "later": [later] * 4}


def test_scripts_are_compared_within_rounds_and_with_the_faster_bare_one() -> None:
    lines = []
    for r, slow in enumerate([1.0, 2.0, 1.5]):  # a machine whose speed changes between rounds
        lines += [script_line("plain", r, 20 * slow, 4 * slow, 4 * slow)]
        lines += [script_line("applied", r, 10 * slow, 4.1 * slow, 0.8 * slow)]
        lines += [script_line("bare 0", r, 9 * slow, 1, 0.9 * slow), script_line("bare 2", r, 9 * slow, 1, 0.7 * slow)]
    row = scripts.table(lines).splitlines()[-1]
    assert row.split(" | ")[1:] == [
        "30.00 s", "15.00 s", "2.00", "1.02", "6.00 s", "1.20 s", "5.00", "1.05 s", "87%", "1.05 s", "87%", "ok |"
    ]  # fmt: skip
    for x in lines:
        if x["way"] == "applied":
            x["later"], x["first"] = [8.0], 9.0
    row = scripts.table(lines).splitlines()[-1]
    assert row.endswith("| missed: first epoch 1.05x, later epochs 4x, 85 % of bare |")
    lines[0]["failed"] = "exit code 1, 0 epochs"
    assert scripts.table(lines).endswith("FAILED: plain: exit code 1, 0 epochs |")


def test_scripts_that_are_not_there_are_wrong_usage() -> None:
    line = [sys.executable, "-m", "benchmarks.scripts", "run", "--only", "nothing"]
    assert subprocess.run(line, cwd=ROOT, capture_output=True).returncode == 2


REPORT = """<testsuites><testsuite tests="4" skipped="1" time="7.4">
<testcase classname="tests.workers.test_idle" name="test_a"/><testcase classname="tests.workers.test_idle" name="test_b[1]">
<failure message="no"/></testcase><testcase classname="tests.workers.test_idle" name="test_c"><skipped/></testcase>
<testcase classname="tests.workers.test_idle" name="test_d"/></testsuite></testsuites>"""


def test_a_later_run_of_the_same_tests_replaces_an_earlier_one(tmp_path: Path) -> None:
    kept = tmp_path / "versions.jsonl"
    old, new = {"torch": "2.4.1", "python": "3.10"}, {"torch": "2.15.0", "python": "3.11", "version": "3.11.7"}
    green = {"passed": 3, "failed": 0, "skipped": 0, "failures": []}
    red = versions.counted(next(ElementTree.fromstring(REPORT).iter("testsuite")))
    versions.keep(kept, {**old, "tests": None, "not_installed": "no Python 3.10 here"})
    versions.keep(kept, {**new, "tests": "workers", **green})
    versions.keep(kept, {**new, "tests": "workers", **red})
    versions.keep(kept, {**new, "tests": "core", **green})
    versions.keep(kept, {**new, "tests": "loader", "failure": "longer than 3600 s"})
    assert versions_table.table(versions_table.read(kept)).splitlines() == [
        "| torch | Python 3.10 | Python 3.11.7 |",
        "|---|---|---|",
        "| 2.15.0 |  | 5 passed, 2 failed, 1 skipped |",
        "| 2.4.1 | not to be had |  |",
        "",
        "- torch 2.15.0, Python 3.11: only tests/core, tests/loader, tests/workers",
        "- torch 2.15.0, Python 3.11: failed: `tests/workers/test_idle.py::test_b[1]`",
        "- torch 2.15.0, Python 3.11: tests/loader: longer than 3600 s",
        "- torch 2.4.1, Python 3.10: no Python 3.10 here",
    ]
    versions.keep(kept, {**old, "tests": "core", **green})
    assert "3.10 here" not in kept.read_text()


@pytest.mark.slow
def test_every_folder_of_tests_is_there() -> None:
    assert all((ROOT / "tests" / name).is_dir() for name in versions_table.TESTS)
    assert versions.pythons()


@pytest.mark.parametrize(
    ("batches", "verdict"),
    [
        ([[0, 1], [2, 3], [4]], "in order; each once"),
        ([[0, 1], [4], [2, 3]], "not in order; each once"),
        ([[0, 1], [4]], "in order; 2 missing"),
        ([[0, 1], [1, 2], [4]], "not in order; 1 missing, 1 twice"),
    ],
)
def test_labels_say_what_was_lost(monkeypatch: pytest.MonkeyPatch, batches: list[list[int]], verdict: str) -> None:
    monkeypatch.setattr(nodes, "PICTURES", 5)
    line = nodes.measure(lambda: iter(batches), "")
    assert cluster_peers._verdict([line]) == verdict
