"""``stoker run --fail-on``: exit code 1 and a sentence; the script's own exit code comes first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.commands import main as cli
from stoker.commands.gate import Gate
from stoker.core.errors import UsageError
from stoker.diagnosis.report.schema import RunReport
from tests.commands.helpers import forked_stoker, script
from tests.diagnosis.helpers import entry


def run(verdict: str = "healthy", **changes: Any) -> RunReport:
    return RunReport(["train.py"], 0, 2.0, [entry(**changes)], verdict)


def kept(folder: Path, report: RunReport) -> str:
    path = folder / "main.json"
    path.write_text(json.dumps(report.as_dict()))
    return f"slower-than={path}"


def test_an_input_bound_run_fails_and_so_does_one_that_is_too_short() -> None:
    gate = Gate(["input-bound"])
    assert list(gate.failed(run("healthy"))) == []
    assert list(gate.failed(run("transfer-bound"))) == []
    assert list(gate.failed(run("input-bound"))) == ["the run is input-bound"]
    assert "too few batches" in next(iter(gate.failed(run("unknown"))))


@pytest.mark.parametrize(
    ("rate", "above", "fails"),
    [(800.0, None, False), (721.0, None, False), (719.0, None, True), (900.0, 0.0, False), (799.0, 0.0, True)],
)
def test_a_slower_run_fails_beyond_the_tolerance(rate: float, above: float | None, fails: bool, tmp_path: Path) -> None:
    before = kept(tmp_path, run(samples_per_s=800.0))
    sentences = list(Gate([before], above).failed(run(samples_per_s=rate)))
    assert bool(sentences) == fails
    if fails:
        assert f"fewer samples/s than in {tmp_path / 'main.json'}; --fail-above allows" in sentences[0]


def test_what_cannot_be_judged_fails(tmp_path: Path) -> None:
    before = kept(tmp_path, run())
    assert "no loader is in both" in next(iter(Gate([before]).failed(run(name="other.py:9"))))
    nothing = {"samples": 0, "batches": 0, "wait_s": 0.0, "step_s": 0.0}
    assert "cannot be judged" in next(iter(Gate([before]).failed(run(**nothing))))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--fail-on", "slow"], "'slow' is not input-bound or slower-than=REPORT"),
        (["--fail-on", "slower-than="], "is not input-bound or"),
        (["--fail-on", "slower-than=nowhere.json"], "nowhere.json cannot be read"),
        (["--fail-on", "slower-than=train.py"], "train.py is not a report"),
        (["--fail-on", "input-bound", "--fail-above", "5%"], "--fail-above needs --fail-on slower-than=REPORT"),
        (["--fail-above", "5%"], "--fail-above needs --fail-on slower-than=REPORT"),
        (["--fail-on", "input-bound", "--fail-above", "x"], "is not a share"),
    ],
)
def test_wrong_conditions(
    options: list[str], why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = script(tmp_path, "open('ran', 'w')")
    assert cli.main(["run", *options, str(path)]) == 2
    assert why in capfd.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_gate_needs_no_report_file_and_none_of_a_script_that_failed(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Gate([], 0.1)
    p = forked_stoker(tmp_path, "--fail-on", "input-bound", script(tmp_path, "raise SystemExit(7)"))
    assert p.returncode == 7
    assert "too few batches" not in p.stderr
    p = forked_stoker(tmp_path, "--fail-on", "input-bound", script(tmp_path, "pass"))
    assert p.returncode == 1
    assert p.stderr.endswith("stoker: too few batches to tell whether the run is input-bound\n")


@pytest.mark.slow
def test_a_real_run(tmp_path: Path) -> None:
    slow = script(tmp_path, nap=0.002)
    p = forked_stoker(tmp_path, "--json", "main.json", "--fail-on", "input-bound", slow)
    assert p.returncode == 1
    assert p.stderr.endswith("stoker: the run is input-bound\n")
    script(tmp_path, nap=0.01)
    p = forked_stoker(tmp_path, "--json", "main.json", "--fail-on", "slower-than=main.json", slow)
    assert p.returncode == 1
    assert "fewer samples/s than in main.json; --fail-above allows 10%\n" in p.stderr
