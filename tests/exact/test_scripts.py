"""Cases as scripts under the command itself: with ``stoker run --apply`` each epoch is the one that the script has without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .cases import CASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]
# Of each kind one; all cases are in ``test_cases``.
NAMES = [
    "LabelsInManyRecords",
    "SwitchedOff",
    "GlobalBySubscript",
    "BehindADescriptor",
    "FilesWrittenAnew",
    "LinksToNothing",
    "DifficultyOfTheStep",
]
SCRIPT = """
import hashlib, os, random, sys
from pathlib import Path
import numpy as np, torch
from torch.utils.data import DataLoader
from tests.exact.cases import CASES

os.environ["EXACT_SCALE"] = "1"
for name in sys.argv[2:]:
    folder = Path(sys.argv[1]) / name
    folder.mkdir()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    data = CASES[name](folder)
    loader = DataLoader(data, batch_size=6, shuffle=True, num_workers=2)
    for epoch in range(4):
        data.between(epoch)
        digest = hashlib.sha256()
        for k, batch in enumerate(loader):
            data.within(k)
            for x in batch if isinstance(batch, list) else [batch]:
                digest.update(x.numpy().tobytes())
        print(name, epoch, digest.hexdigest())
"""


def lines(where: Path, command: list[str]) -> list[str]:
    where.mkdir()
    script = where / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, *command, str(script), str(where), *NAMES],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert not found.returncode, found.stderr[-2000:]
    return [line for line in found.stdout.splitlines() if line.split(" ")[0] in CASES]


def test_a_script_gets_what_it_gets_without(tmp_path: Path) -> None:
    plain = lines(tmp_path / "plain", [])
    applied = lines(tmp_path / "applied", ["-m", "stoker", "run", "--apply"])
    assert len(plain) == 4 * len(NAMES)
    assert applied == plain
