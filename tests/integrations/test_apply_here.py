"""What ``%stoker_apply`` does, without a notebook: ``--apply`` in a process that runs already, and back."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker.diagnosis.watch import patch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stoker's own workers are on Linux")


class Slow(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.002)
        return torch.full((8, 8), float(i))


@pytest.mark.slow
def test_on_and_off() -> None:
    torchs: Any = DataLoader
    before = torchs._get_iterator
    loader = DataLoader(Slow(), batch_size=8, num_workers=1)
    expected = torch.stack(list(loader))
    patch.apply_on()
    patch.apply_on()
    try:
        with stoker.watch() as w:
            it = iter(loader)
            assert type(it).__module__.startswith("stoker.")
            assert torch.equal(torch.stack(list(it)), expected)
        assert w.report is not None
        (name,) = w.report["applied"]["settings"]
        assert [e["name"] for e in w.report["loaders"]] == [name]
    finally:
        patch.apply_off()
        patch.apply_off()
    assert torchs._get_iterator is before
    assert torch.equal(torch.stack(list(loader)), expected)
    assert type(iter(loader)).__module__.startswith("torch.")
    with stoker.watch() as w:
        list(loader)
    assert w.report is not None
    assert w.report["applied"] is None


@pytest.mark.slow
def test_installs_around_it() -> None:
    """Whatever was put around it, on is on and off is off."""
    loader = DataLoader(Slow(), batch_size=8)
    for _ in range(2):
        patch.apply_on()
        applied = type(iter(loader))
        stoker.install()
        stoker.DataLoader(Slow(), batch_size=8)  # stays behind loaders that are made from it
        assert type(iter(loader)) is applied
        patch.apply_off()
        assert type(iter(loader)).__module__.startswith("stoker.")
        stoker.uninstall()
        assert type(iter(loader)).__module__.startswith("torch.")
    with stoker.watch() as w:
        list(loader)
    assert w.report is not None
    assert w.report["applied"] is None
