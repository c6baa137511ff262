"""What a call of a ``torch.nn.Module`` in a dataset runs beside its class's ``forward``, for a few samples only."""

from __future__ import annotations

import shelve
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import stoker
from tests.exact.cases import assert_as_made

N, RARE = 80, 37


def is_rare(x: torch.Tensor) -> bool:
    return round(float(x.flatten()[0]) * N) % 40 == RARE


def doubled(module: nn.Module, arguments: Any, result: Any) -> Any:
    return result * 2 if is_rare(arguments[0]) else None


class Steps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp().log().exp() + torch.rand(500)


class Quiet(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp().log().exp()


class Modules(Dataset[Any]):
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        x = self.module(torch.full((500,), i / N))
        return x, float(torch.rand(()))


def hooked(module: nn.Module, patch: pytest.MonkeyPatch) -> None:
    module.register_forward_hook(doubled)


def replaced(module: nn.Module, patch: pytest.MonkeyPatch) -> None:
    forward: Callable[..., Any] = module.forward
    module.forward = lambda x: forward(x) * 2 if is_rare(x) else forward(x)  # type: ignore[method-assign]


def replaced_in_class(module: nn.Module, patch: pytest.MonkeyPatch) -> None:
    forward = type(module).forward
    patch.setattr(type(module), "forward", lambda self, x: forward(self, x) * 2 if is_rare(x) else forward(self, x))


def hooked_everywhere(module: nn.Module, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(torch.nn.modules.module._global_forward_hooks, 12345, doubled)


CHANGES = [hooked, replaced, replaced_in_class, hooked_everywhere]
MADE: dict[str, Callable[[], nn.Module]] = {
    "one": Steps,
    "quiet": Quiet,
    "several": lambda: nn.Sequential(Quiet(), Steps()),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("change", CHANGES)
def test_hooks_and_other_forwards(
    change: Callable[..., None], made: str, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if made == "several" and change is replaced_in_class:
        pytest.skip("torch's own class")
    data = Modules(MADE[made]())
    if epoch == 0:
        change(data.module, monkeypatch)
    staged = stoker.Staged(data, cache="ram")
    for k in range(3):
        if k == epoch > 0:
            change(data.module, monkeypatch)
        staged._begin()
        for i in range(N):
            torch.manual_seed(i)
            cached = staged[i]
            torch.manual_seed(i)
            own = data[i]
            assert torch.equal(cached[0], own[0]), (k, i)
            assert cached[1] == own[1], (k, i)


class Suffixed(Dataset[Any]):
    """A rare sample reads a file of whose name a library adds the end."""

    def __init__(self, stem: Path, kind: str) -> None:
        self.stem, self.kind = str(stem), kind

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        x = torch.full((500,), i / N).exp().log().exp()
        if i % 40 == RARE and self.kind == "npy":
            x = x * float(np.load(self.stem + ".npy"))
        elif i % 40 == RARE:
            with shelve.open(self.stem, "r") as table:
                x = x * table["gain"]
        return x + torch.rand(500)


@pytest.mark.parametrize("kind", ["npy", "shelve"])
def test_a_library_adds_a_suffix(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(gain: float) -> None:
        if kind == "npy":
            np.save(tmp_path / "names.npy", gain)
        else:
            with shelve.open(str(tmp_path / "names"), "n") as table:
                table["gain"] = gain

    write(1.0)
    data = Suffixed(tmp_path / "names", kind)
    staged = stoker.Staged(data, cache="ram")
    for epoch in range(3):
        if epoch:
            write(1.0 + epoch)
        staged._begin()
        assert_as_made(staged, data, epoch)


class Devices(Dataset[Any]):
    """Its code names a terminal, whose times change with each line."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        if i < 0:
            open("/dev/tty").close()
        return torch.full((500,), i / N).exp().log().exp() + torch.rand(500)


def test_devices_are_no_files() -> None:
    staged = stoker.Staged(Devices(), cache="ram")
    assert staged.split is not None
    named = staged._source_files(staged._inputs()).stamps
    assert not [path for path in named if path.startswith("/dev/")]
