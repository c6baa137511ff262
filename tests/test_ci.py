"""The recipe for CI, as a CI would run it: a small repository, a change that makes its data loading slower."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "examples" / "ci" / "against_base.sh"
WORKFLOW = ROOT / "examples" / "ci" / "data-loading.yml"
TRAIN = """
import sys, time
from torch.utils.data import DataLoader

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep({nap})
        return i

for epoch in range(int(sys.argv[2])):
    for batch in DataLoader(Data(), batch_size=4):
        pass
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One commit on main; ``stoker`` is a command there."""
    folder = tmp_path / "repository"
    (folder / "examples").mkdir(parents=True)
    shutil.copytree(RECIPE.parent, folder / "examples" / "ci")
    (folder / "bin").mkdir()
    (folder / "bin" / "stoker").write_text(f'#!/bin/sh\nexec {sys.executable} -m stoker "$@"\n')
    (folder / "bin" / "stoker").chmod(0o755)
    (folder / "train.py").write_text(TRAIN.format(nap=0.002))
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "train.py")
    git(folder, "commit", "--quiet", "-m", "a")
    return folder


def environment(folder: Path) -> dict[str, str]:
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    return {**os.environ, **names, "PATH": path, "GITHUB_BASE_REF": "main"}


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, env=environment(folder), check=True, timeout=60)


def shell(folder: Path, line: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euc", line],
        cwd=folder,
        env={**environment(folder), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def comparing() -> str:
    """The workflow's step that compares."""
    found = re.search(r"name: Compare with the base\n +run: (.*)\n", WORKFLOW.read_text())
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_the_workflow_fails_when_loading_got_slower_and_only_then(repository: Path) -> None:
    git(repository, "branch", "origin/main")
    same = shell(repository, comparing(), FAIL_ABOVE="90%")
    assert same.returncode == 0, same.stderr
    (repository / "train.py").write_text(TRAIN.format(nap=0.02))
    slower = shell(repository, comparing(), FAIL_ABOVE="15%")
    assert slower.returncode == 1, slower.stderr
    assert re.search(
        r"stoker: train\.py:\d+: \d+\.\d% fewer samples/s than in .*base\.json; --fail-above allows 15%\n",
        slower.stderr,
    )
    assert {path.name for path in (repository / "stoker-ci").iterdir()} == {"base.json", "head.json", "head.html"}
    trees = subprocess.run(["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True)
    assert len(trees.stdout.splitlines()) == 1  # the base's is removed


def test_wrong_usage_of_the_recipe(repository: Path) -> None:
    assert shell(repository, "examples/ci/against_base.sh main").returncode == 2
    p = shell(repository, "TMPDIR=$PWD/bin examples/ci/against_base.sh nowhere train.py")
    assert p.returncode not in (0, 1)
    assert "nowhere" in p.stderr
    assert [path.name for path in (repository / "bin").iterdir()] == ["stoker"]


AGENT = """
import time
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, i):
        time.sleep(0.01)
        return i

if __name__ == "__main__":
    for batch in DataLoader(Data(), batch_size=8):
        time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("patch")), reason="AGENTS.md uses jq and patch")
def test_an_agent_closes_the_loop(repository: Path) -> None:
    """The commands of AGENTS.md, one after the other."""
    (repository / "train.py").write_text(AGENT)
    lines = re.findall(r"(?m)^ {7}((?:stoker|jq) .*)$", (ROOT / "AGENTS.md").read_text())
    assert len(lines) == 5
    for line in lines:
        p = shell(repository, f"set -o pipefail; {line}")
        assert p.returncode == 0, f"{line}\n{p.stderr}"
        if line.startswith("jq '{"):
            assert '"main_process_loading"' in p.stdout
    assert "num_workers=" in (repository / "train.py").read_text()
    assert "samples/s" in p.stdout
