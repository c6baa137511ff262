"""Scripts that need torch, NumPy and Pillow alone, each in two ways or three: as it is, with --apply, and observed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .harness import HERE, WAYS, three_ways

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="stoker's own workers are on Linux"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
]

# Scripts of one file that want nothing said. Each takes ten seconds and more, so none of them is in the fast suite.
ALONE = sorted(path.name for path in (HERE / "cases").glob("*.py") if path.name != "ranks.py")
# What is observed are loaders, which --apply observes as well. These are the scripts whose loaders, or the processes and
# threads around them, are of their own kind; the others have their own kind of dataset.
OBSERVED = {
    "gan.py",
    "multi_epochs.py",
    "own_memory.py",
    "stream.py",
}


@pytest.mark.parametrize("name", ALONE)
def test_script(name: str, tmp_path: Path, data: Path) -> None:
    three_ways(f"cases/{name}", tmp_path, data, ways=list(WAYS) if name in OBSERVED else ["plain", "applied"])


def test_two_ranks(tmp_path: Path, data: Path) -> None:
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE / "cases/ranks.py")]
    three_ways(line, tmp_path, data, ways=["plain", "applied"])


def test_a_package_with_arguments(tmp_path: Path, data: Path) -> None:
    line = ["-m", "trainer", "--data-path", str(data), "--epochs", "3", "-j", "1"]
    three_ways(line, tmp_path, data, path=HERE / "cases/project")
