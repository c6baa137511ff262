"""``--help``: three commands stand first, and the examples at the end of each help text run as they are printed."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.commands import main
from stoker.commands.main import COMMANDS, FIRST
from stoker.diagnosis.report.schema import RunReport
from tests.commands.helpers import forked, help_texts
from tests.diagnosis.helpers import entry

LIMIT_S = 120
RUNNING = "4242"  # the process id in examples
TRAIN = """
    import sys
    import torch
    from torch.utils.data import DataLoader, Dataset

    class ImageFolder(Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, i):
            return {"image": torch.full((3, 8, 8), i, dtype=torch.uint8), "label": i % 10}

    train_set = ImageFolder()
    loader = DataLoader(train_set, batch_size=8, num_workers=1)

    def make_loader():
        return DataLoader(train_set, batch_size=8, num_workers=1)

    def step(batch):
        batch["image"].float().sum()

    if __name__ == "__main__":
        if "--wait" in sys.argv:
            sys.stdin.read()
        for epoch in range(2):
            for batch in loader:
                step(batch)
"""
FILL = """
import os, sys, stoker
sys.path.insert(0, os.getcwd())
import train
for batch in stoker.DataLoader(stoker.Staged(train.train_set, cache="disk"), batch_size=8):
    pass
"""


HELP = dict(help_texts())


def examples(text: str) -> list[str]:
    """The lines below the last heading, if that is "Examples:"; without what is said about them."""
    heading, _, lines = text.rpartition(":\n")
    return [re.split(r"  +", line.strip())[0] for line in lines.splitlines()] if heading.endswith("Examples") else []


EXAMPLES = dict.fromkeys(example for text in HELP.values() for example in examples(text))


def test_help_ends_with_examples() -> None:
    """arguments.command makes commands whose examples are shown last."""
    found = {command: examples(text) for command, text in HELP.items()}
    assert [command for command, lines in found.items() if len(lines) < 2] == []
    assert [line for lines in found.values() for line in lines if not line.startswith("stoker ")] == []


def test_three_commands_stand_first() -> None:
    text = HELP["stoker"]
    assert len(FIRST) == 3
    named = re.findall(r"(?m)^(\w+):$|^  ([a-z-]+)  ", text.partition("Options:")[0])
    assert [heading or name for heading, name in named] == ["Commands", *FIRST, "More", *list(COMMANDS)[3:]]


def test_help_fits_forty_columns() -> None:
    text = dict(help_texts(40))["stoker"].partition("Examples:")[0]
    assert max(map(len, text.splitlines())) <= 40


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples name: scripts, a package, reports, a cache."""
    out = tmp_path_factory.mktemp("examples")
    script = "\n".join(line[4:] for line in TRAIN.splitlines())
    for name in ("train.py", "package/train.py", "mypackage/data.py"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(script)
    (out / "fill.py").write_text(FILL)
    kept = json.dumps(RunReport(["train.py"], 0, 2.0, [entry()], "healthy").as_dict())
    for name in ("main.json", "branch.json", "before.json", "after.json"):
        (out / name).write_text(kept)
    (out / "bin").mkdir()
    executable(out / "bin" / "stoker", f'exec "{sys.executable}" -m stoker "$@"')
    if shutil.which("jq") is None:
        executable(out / "bin" / "jq", "exec cat")
    return out


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


# Real processes: a script, a command that starts Python, a module. Of the others the options are read, and no script runs.
REAL = ("stoker run --json -", "stoker run torchrun", "stoker run -m")


def words_of(example: str) -> list[str]:
    """The words behind ``stoker``, without what the shell does with what it prints."""
    return shlex.split(example.split(" | ")[0])[1:]


def skip_if_not_here(said: str) -> None:
    if "torch sees none here" in said or "needs prometheus-client" in said:
        pytest.skip(said.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="stoker run is on Linux")
@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.startswith((*REAL, "stoker cache ls --json"))])
def test_an_example_with_a_shell_runs(example: str, folder: Path) -> None:
    done = run(example, folder)
    skip_if_not_here(done.stderr)
    assert done.returncode == 0, done.stderr


def test_examples_of_run_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options that they name; whether each does what it says is in other tests."""
    given = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr("stoker.commands.run.run", lambda options: given.append(options) or 0)
    found = [e for e in EXAMPLES if e.startswith("stoker run")]
    for example in found:
        assert main.main(words_of(example)) == 0, example
    assert len(given) == len(found) >= 8
    assert {options.command[0] for options in given} == {"train.py", "torchrun", "package.train"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="stoker run is on Linux")
def test_the_other_examples_run(folder: Path) -> None:
    """In forks, one after the other: each in a process of its own, which imports nothing anew."""
    filled = forked(lambda: runpy.run_path("fill.py") and None, folder, environment(folder))
    assert filled.returncode == 0, filled.stderr
    failed = []
    line = [sys.executable, "train.py", "--wait"]
    with subprocess.Popen(line, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as waits:
        for example in EXAMPLES:
            if example.startswith("stoker run"):
                continue
            words = words_of(re.sub(r"\$\(.*\)", RUNNING, example))
            words = [str(waits.pid) if word == RUNNING else word for word in words]
            words += ["--time-limit", "2"] * example.startswith("stoker tune")
            done = forked(lambda words=words: main.main(words), folder, environment(folder))  # type: ignore[misc]
            if done.returncode and "torch sees none here" not in done.stderr:
                failed.append((example, done.returncode, done.stderr))
        waits.kill()
    assert not failed
