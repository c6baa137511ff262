"""The benchmark runner: it runs, keeps what it measured, and computes what it prints. No speed is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import table

ROOT = Path(__file__).parent.parent


def benchmarks(*args: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "benchmarks", *args]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=200)


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
