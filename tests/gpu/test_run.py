"""``stoker run`` of a script that computes on a real device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.commands.helpers import script, stoker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TRAIN = """
import numpy as np, random, torch
from torch.utils.data import DataLoader, Dataset

class Waves(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, i):
        x = np.arange(20000, dtype=np.float32) + i
        for _ in range(20):
            x = np.sin(x) + i
        return torch.from_numpy(np.roll(x, random.randrange(9)))

net = torch.nn.Linear(20000, 10).cuda()
for epoch in range(5):
    total = torch.zeros((), device="cuda")
    for x in DataLoader(Waves(), 16, shuffle=True, num_workers=3, pin_memory=True):
        total += net(x.cuda(non_blocking=True)).square().mean()
        total.item() if epoch == 1 else None
    print("epoch", epoch)
"""


@pytest.mark.parametrize("options", [[], ["--apply"]], ids=["observed", "applied"])
def test_workers_of_later_epochs_live(tmp_path: Path, options: list[str]) -> None:
    """The watch keeps CUDA events in the script's process, and forks inherit them."""
    p = stoker(tmp_path, *options, "--json", str(tmp_path / "r.json"), script(tmp_path, TRAIN))
    assert p.returncode == 0, p.stderr[-2000:]
    assert p.stdout.count("epoch") == 5
    found = json.loads((tmp_path / "r.json").read_text())["loaders"][0]
    assert found["epochs"] == 5
    assert found["device"]["gaps"] > 0
