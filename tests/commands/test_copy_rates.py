"""``stoker check`` beside a device, with a stand-in for it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker.commands import check, copy_rates, main
from stoker.core import resources


class Cuda:
    def __init__(self, fails: str = "") -> None:
        self.fails, self.locked = fails, 0

    def register(self, address: int, nbytes: int) -> str:
        self.locked += not self.fails
        return self.fails

    def unregister(self, address: int) -> None:
        self.locked -= 1


def stand_in() -> Any:
    """torch with a CUDA device that is the CPU."""
    cuda = SimpleNamespace(get_device_name=lambda: "Stand-in <1>", synchronize=lambda: None)
    return SimpleNamespace(
        cuda=cuda,
        uint8=torch.uint8,
        empty=lambda n, dtype, device: torch.empty(n, dtype=dtype),
        ones=lambda n, dtype, pin_memory: torch.ones(n, dtype=dtype),
    )


def test_what_is_measured() -> None:
    cuda = Cuda()
    found = copy_rates.measure(stand_in(), cuda)
    assert list(found.rates) == ["pageable", "pinned", "registered"]
    assert all(rate > 0 for rate in found.rates.values())
    assert found.register_s_per_gb is not None
    assert not cuda.locked
    assert "64 MiB to Stand-in <1>, GB/s: " in str(found)
    assert "s a GB" in str(found)


def test_what_cannot_be_measured_is_said() -> None:
    found = copy_rates.measure(stand_in(), Cuda("injected\nmore"))
    assert list(found.rates) == ["pageable", "pinned"]
    assert found.register_s_per_gb is None
    assert found.notes == ["registered memory: injected"]


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if resources.read().gpus:
        pytest.skip("there is one")
    assert main.main(["check"]) == 0
    assert "there is no accelerator" in capsys.readouterr().out.replace("\n", " ")
    monkeypatch.setattr(check, "_copies", lambda: copy_rates.measure(stand_in(), Cuda()))
    monkeypatch.setattr(resources, "gpus", lambda: [resources.Gpu("Stand-in", 1 << 34, 1 << 34, None)])
    assert main.main(["check", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["copies"]["device"] == "Stand-in <1>"
    assert out["pin_memory"].startswith("pin_memory=")
