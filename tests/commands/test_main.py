"""The command line itself: what it imports, what it leaves to a script, names of earlier versions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.commands import main
from tests.commands.helpers import forked_stoker


def test_a_command_is_imported_when_it_runs() -> None:
    code = (
        "import sys; from stoker.commands.main import main; main(['check', '--json', '-']);"
        "print({m for m in sys.modules if m.startswith('stoker.commands.')} | {'torch'} & set(sys.modules))"
    )
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    imported = p.stdout.splitlines()[-1]
    for name in ("bench", "tune", "stats", "run", "verify", "cache", "torch"):
        assert name not in imported.replace("stoker.commands.check", "")


def test_what_follows_the_script_is_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, json; print(json.dumps(sys.argv[1:]))")
    args = ["--json", "x", "--", "-m", "--workers=3", "--budget-s", "", "--help", "-n", "a b"]
    p = forked_stoker(tmp_path, "--json", "r.json", script, *args)
    assert p.returncode == 0, p.stderr
    assert json.loads(p.stdout) == args
    assert json.loads((tmp_path / "r.json").read_text())["command"] == [str(script), *args]


def test_wrong_numbers_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "nowhere.py:x", "--time-limit", "0"]) == 2
    assert "Invalid value for '--time-limit'" in capsys.readouterr().err
    assert main.main(["verify", "nowhere.py:x", "--num-workers", "few"]) == 2
    assert "'few' is not a number of workers" in capsys.readouterr().err


def completed(typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What bash is offered for the last word of a line."""
    for name, value in {
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
        "_STOKER_COMPLETE": "bash_complete",
    }.items():
        monkeypatch.setenv(name, value)
    assert main.main([]) == 0
    monkeypatch.delenv("_STOKER_COMPLETE")
    return capsys.readouterr().out.split()


def test_a_shell_completes_commands_options_and_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed("stoker ex", monkeypatch, capsys) == ["plain,explain"]
    assert completed("stoker run --ap", monkeypatch, capsys) == ["plain,--apply"]
    assert completed("stoker run tr", monkeypatch, capsys) == ["file,tr"]
    assert completed("stoker tune tr", monkeypatch, capsys) == ["file,tr"]
    assert completed("stoker explain slow-dec", monkeypatch, capsys) == ["plain,slow-decode"]
    for shell in ("zsh", "fish"):
        assert main.main(["--print-completion", shell]) == 0
        assert f"_STOKER_COMPLETE={shell}_complete" in capsys.readouterr().out
    assert main.main(["--print-completion", "tcsh"]) == 2
