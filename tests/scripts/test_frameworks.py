"""Scripts of frameworks, each in two ways or three: as it is, with --apply, and observed. ``make test-scripts``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .harness import HERE, WAYS, three_ways

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="stoker's own workers are on Linux"),
    pytest.mark.scripts,
    pytest.mark.timeout(600),
]

HELPERS = {"nifti.py"}
OF_RAY = "ray_tasks.py"
UNSEEDED = {"web_shards.py"}  # webdataset takes the seed of a shuffle from the clock
NAMES = sorted(path.name for path in (HERE / "frameworks").glob("*.py") if path.name not in {*HELPERS, OF_RAY})
# The frameworks that iterate, rebuild or wrap loaders themselves; in the other scripts the script's own loop does.
OBSERVED = {
    "accelerate_loop.py",
    "fastai_learner.py",
    "hf_stream.py",
    "hf_trainer.py",
    "lightning_ddp.py",
    "lightning_module.py",
    "stateful.py",
    "timm_loader.py",
    OF_RAY,
}


@pytest.mark.parametrize("name", [*NAMES, pytest.param(OF_RAY, marks=pytest.mark.cluster)])
def test_script(name: str, tmp_path: Path, data: Path) -> None:
    ways = list(WAYS) if name in OBSERVED else ["plain", "applied"]
    three_ways(f"frameworks/{name}", tmp_path, data, seeded=name not in UNSEEDED, ways=ways)
