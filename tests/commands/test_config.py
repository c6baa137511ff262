"""[tool.stoker] in a pyproject.toml: defaults for stoker run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.commands import config, main
from stoker.commands.run import Options

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """The options with which scripts would run, which are in tmp_path/code and below."""
    found: list[Options] = []
    for name in ("code/train.py", "code/deep/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stoker.commands.run.run", lambda options: found.append(options) or 0)
    return found


def write(table: str, folder: str = ".") -> Path:
    path = Path(folder) / "pyproject.toml"
    path.write_text(f'[project]\nname = "x"\n\n[tool.stoker]\n{table}\n')
    return path.resolve()


def of(given: list[Options], *args: str) -> Options:
    assert main.main(["run", *args]) == 0
    return given.pop()


def test_a_table_has_defaults_and_the_command_line_wins(given: list[Options]) -> None:
    write('keep = "20GB"\njson = "a.json"\ndetails = true\ngpu-price = 2.5\nfail-on = ["input-bound"]')
    found = of(given, "--apply", "code/train.py")
    assert (found.keep, found.json_path, found.details) == (str(20 * 10**9), Path("a.json"), True)
    assert found.prices is not None
    assert found.prices.gpu == 2.5
    assert found.gate.input_bound
    found = of(given, "--apply", "--keep", "disk", "--json", "b.json", "code/train.py", "--json", "the script's")
    assert (found.keep, found.json_path) == ("disk", Path("b.json"))
    assert found.command[1:] == ("--json", "the script's")


def test_the_nearest_table_is_the_one(given: list[Options]) -> None:
    write('json = "far.json"')
    write('json = "near.json"', "code")
    Path("code/deep/pyproject.toml").write_text("[tool.stokers]\nx = 1\n# [tool.stoker]\n")
    for script, name in (("code/train.py", "near.json"), ("code/deep/train.py", "near.json")):
        assert of(given, script).json_path == Path(name)
    for command in (["-m", "code.train"], ["torchrun", "code/train.py"]):  # from the current folder upwards
        assert of(given, *command).json_path == Path("far.json")


def test_what_needs_an_option_that_is_not_there_has_no_effect(given: list[Options]) -> None:
    write('keep = "disk"\nworkers-on = "ray"\ngpus = 8\nfail-above = "5%"')
    found = of(given, "code/train.py")
    assert (found.keep, found.workers_on, found.prices) == ("no", "", None)
    found = of(given, "--gpu-price", "2", "code/train.py")
    assert found.prices is not None
    assert found.prices.gpus == 8


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("kep = 1", "[tool.stoker] has the unknown key 'kep'; did you mean keep?"),
        ("apply = true", "[tool.stoker] has the unknown key 'apply'; it may have cpu-price, details,"),
        ("max-steps = 3", "unknown key 'max-steps'"),
        ('details = "yes"', "[tool.stoker]: details must be true or false, not 'yes'"),
        ("json = true", "[tool.stoker]: json must be a string or a number, not True"),
        ("json = {}", "json must be a string or a number, not {}"),
        ('gpu-price = "x"', "[tool.stoker]: Invalid value for '--gpu-price'"),
        ('on-mismatch = "explode"', "Invalid value for '--on-mismatch'"),
        ('keep = "much"', "[tool.stoker]: --keep must be"),
        ("keep = ", "is not TOML"),
    ],
)
def test_a_wrong_table_names_the_file_and_the_key(
    table: str, said: str, given: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(table)
    assert main.main(["run", "--apply", "code/train.py"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"stoker: {path}")
    assert said in shown
    assert shown.count("\n") == 1
    assert given == []
    assert main.main(["run", "--help", "code/train.py"]) == 0


def test_what_is_wrong_on_the_command_line_is_not_blamed_on_the_file(
    given: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    write('keep = "20GB"')
    assert main.main(["run", "--apply", "--keep", "much", "code/train.py"]) == 2
    assert "pyproject" not in capsys.readouterr().err


def test_the_table_of_another_user_is_not_read(
    given: list[Options], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who may write in a folder above, such as /tmp, cannot choose which files stoker writes."""
    path = write('json = "/home/user/precious"')
    stat = Path.stat

    class Others:
        st_uid = os.geteuid() + 4321

        def __init__(self, real: os.stat_result) -> None:
            self.st_mode = real.st_mode

    def other(self: Path, **kw: Any) -> Any:
        return Others(stat(self, **kw)) if self == path else stat(self, **kw)

    monkeypatch.setattr(config.Path, "stat", other)
    assert of(given, "code/train.py").json_path == Path("stoker-report.json")
    assert f"{path} is ignored: it belongs to another user" in capsys.readouterr().err


def test_a_pipe_is_not_read(given: list[Options]) -> None:
    os.mkfifo("pyproject.toml")
    assert of(given, "code/train.py").json_path == Path("stoker-report.json")


def test_an_older_python_says_that_it_cannot_read_it(
    given: list[Options], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write('json = "a.json"')
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    assert of(given, "code/train.py").json_path == Path("stoker-report.json")
    assert f"[tool.stoker] of {path} is ignored: reading it needs Python 3.11" in capsys.readouterr().err
