"""Scripts of frameworks, each in three ways: as it is, observed, and with --apply. ``make test-scripts``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .harness import HERE, three_ways

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="stoker's own workers are on Linux"),
    pytest.mark.scripts,
    pytest.mark.timeout(600),
]

HELPERS = {"nifti.py"}
UNSEEDED = {"web_shards.py"}  # webdataset takes the seed of a shuffle from the clock
NAMES = sorted(path.name for path in (HERE / "frameworks").glob("*.py") if path.name not in HELPERS)


@pytest.mark.parametrize("name", NAMES)
def test_script(name: str, tmp_path: Path, data: Path) -> None:
    three_ways(f"frameworks/{name}", tmp_path, data, seeded=name not in UNSEEDED)
