"""What somebody sees who does not know stoker yet: no arguments, a typo, a wrong file. One sentence says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.commands import main
from stoker.commands.main import COMMANDS
from tests.commands.helpers import forked_stoker


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print('ran')")
    (tmp_path / "nb.ipynb").write_text("{}")
    for name in ("src", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "src" / "trainer.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_arguments_it_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    said = capsys.readouterr().err
    assert len(said.split("\n\n")[0]) < 120
    assert {"run", "why", "tune", "explain"} == {line.split("stoker ")[1].split()[0] for line in said.splitlines()[2:6]}
    assert COMMANDS.keys() > {"run", "why", "tune", "explain"}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("rum train.py", "there is no command 'rum'; did you mean: stoker run train.py"),
        ("train.py --epochs 2", "there is no command 'train.py'; did you mean: stoker run train.py --epochs 2"),
        ("frobnicate", "there is no command 'frobnicate'; see stoker --help"),
        ("cache prun", "there is no command 'prun'; did you mean: stoker cache prune"),
        ("run --aply train.py", "stoker run has no option --aply; did you mean --apply?"),
        ("run --xyzzy train.py", "stoker run has no option --xyzzy; see stoker run --help"),
        ("run", "name a script, for example: stoker run train.py"),
        ("run trian.py --epochs 2", "there is no trian.py; did you mean train.py?"),
        ("run src/train.py", "there is no src/train.py; did you mean src/trainer.py?"),
        ("run xyzzy.py", "there is no xyzzy.py; check its path"),
        ("run pythom train.py", "there is no pythom; did you mean python?"),
        ("run src", "src is a folder; did you mean src/trainer.py?"),
        ("run empty", "empty is a folder; name a script in it"),
        ("tune", "Missing argument 'TARGET'; see stoker tune --help"),
    ],
)
def test_wrong_usage_is_one_sentence(typed: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(typed.split()) == 2
    assert capsys.readouterr().err == f"stoker: {said}\n"
    assert not (folder / "stoker-report.json").exists()


def test_a_notebook_is_run_in_jupyter(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", "nb.ipynb"]) == 2
    said = capsys.readouterr().err
    assert "%load_ext stoker" in said
    assert "%%stoker" in said
    assert said.count("\n") == 1


def test_a_folder_that_python_runs(folder: Path) -> None:
    (folder / "src" / "__main__.py").write_text("raise SystemExit(7)")
    assert forked_stoker(folder, "src").returncode == 7


def test_a_script_without_loaders_has_its_own_exit_code(folder: Path) -> None:
    done = forked_stoker(folder, "train.py")
    assert done.returncode == 0
    assert "run code that iterates one" in " ".join(done.stderr.split())
