"""``--help``: three commands stand first, and the examples at the end of each help text run as they are printed."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.commands.main import COMMANDS, FIRST
from tests.commands.helpers import help_texts

LIMIT_S = 120
FAST = ("stoker check", "stoker explain")
RUNNING = "4242"  # the process id in examples
NEEDS_DEVICE = "stoker batch-size"
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
FILL = "import stoker, train; [*stoker.DataLoader(stoker.Staged(train.train_set, cache='disk'), batch_size=8)]"


HELP = dict(help_texts())


def examples(text: str) -> list[str]:
    """The lines below the last heading, if that is "Examples:"; without what is said about them."""
    heading, _, lines = text.rpartition(":\n")
    return [re.split(r"  +", line.strip())[0] for line in lines.splitlines()] if heading.endswith("Examples") else []


EXAMPLES = dict.fromkeys(example for text in HELP.values() for example in examples(text))


@pytest.mark.parametrize("command", HELP)
def test_help_ends_with_examples(command: str) -> None:
    found = examples(HELP[command])
    assert len(found) >= 2, "arguments.command makes commands whose examples are shown last"
    assert all(re.match(r"(?:\w+=\S+ )?stoker ", example) for example in found)


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
    (out / "bin").mkdir()
    executable(out / "bin" / "stoker", f'exec "{sys.executable}" -m stoker "$@"')
    if shutil.which("jq") is None:
        executable(out / "bin" / "jq", "exec cat")
    return out


@pytest.fixture(scope="module")
def reports(folder: Path) -> None:
    """Four times the same report: none is slower than another."""
    done = run("stoker run --json main.json train.py", folder)
    assert done.returncode == 0, done.stderr
    for name in ("branch.json", "before.json", "after.json"):
        shutil.copy(folder / "main.json", folder / name)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[int]:
    """The process id of a script that waits."""
    line = [sys.executable, "train.py", "--wait"]
    with subprocess.Popen(line, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        yield process.pid
        process.kill()


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )


CASES = [pytest.param(e, marks=[] if e.startswith(FAST) else [pytest.mark.slow]) for e in EXAMPLES]


@pytest.mark.skipif(sys.platform != "linux", reason="stoker run is on Linux")
@pytest.mark.parametrize("example", CASES)
def test_an_example_runs(example: str, folder: Path, request: pytest.FixtureRequest) -> None:
    if not example.startswith(FAST):
        request.getfixturevalue("reports")
        pid = request.getfixturevalue("running")
        example = re.sub(rf"\b{RUNNING}\b", str(pid), example)
    if example.startswith("stoker cache"):
        done = run(f'python -c "{FILL}"', folder)
        assert done.returncode == 0, done.stderr
    done = run(f"{example} --time-limit 3" if example.startswith("stoker tune") else example, folder)
    if example.startswith(NEEDS_DEVICE) and "torch sees none here" in done.stderr:
        pytest.skip("no accelerator")
    if "needs prometheus-client" in done.stderr:
        pytest.skip("the extra is not here")
    if "--fail-on slower-than" in example and "fewer samples/s" in done.stderr:
        assert done.returncode == 1  # which the machine's other work decides
        return
    assert done.returncode == 0, done.stderr
