"""``stoker check`` beside a device, with a stand-in for it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from stoker.commands import copy_rates, main
from stoker.core import resources


class Bench:
    """A bus of 50 GB/s with 10 us before each copy; pageable memory at a fifth of it."""

    name = "Stand-in <1>"

    def __init__(self, fail: str = "") -> None:
        self.fail = fail

    def copy(self, kind: str, nbytes: int) -> float:
        if kind == self.fail:
            raise RuntimeError("injected\nmore")
        return 1e-5 + nbytes / (10e9 if kind == "pageable" else 50e9)

    def register(self, nbytes: int) -> float:
        return nbytes * 0.2e-9

    def overlap(self) -> float:
        return 0.9

    def node(self) -> int | None:
        return None


def test_what_is_measured() -> None:
    found = copy_rates.measure(Bench(), 1 << 40)
    assert list(found.rates) == list(copy_rates.KINDS)
    assert set(found.rates["pinned"]) == set(copy_rates.SIZES)
    assert found.rates["pinned"][1 << 30] == pytest.approx(50, rel=0.01)
    assert found.register_s_per_gb == pytest.approx(0.2)
    words = copy_rates.text(found)
    assert "1 KiB" in words
    assert "1,024 MiB" in words
    assert "0.20 s a GB" in words
    assert max(map(len, words.splitlines())) <= 80
    root = ET.fromstring(copy_rates.svg(found))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 3
    assert "Stand-in <1>" in "".join(root.itertext())


def test_what_cannot_be_measured_is_said() -> None:
    found = copy_rates.measure(Bench("registered"), 1 << 30)
    assert found.rates["registered"] == {}
    assert max(found.rates["pinned"]) == 1 << 28
    assert "registered, 1,024 bytes: injected" in found.notes
    assert any("too little memory is free" in note for note in found.notes)
    assert "<svg" in copy_rates.svg(copy_rates.Copies("nothing"))


def test_distances_are_read_as_the_kernel_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, (cpus, row) in enumerate([("0-1,4", "10 21"), ("2-3", "21 10")]):
        (tmp_path / f"node{n}").mkdir()
        (tmp_path / f"node{n}" / "cpulist").write_text(cpus + "\n")
        (tmp_path / f"node{n}" / "distance").write_text(row + "\n")
    monkeypatch.setattr(copy_rates.os, "sched_getaffinity", lambda _: {0, 4})
    assert copy_rates.distance(1, tmp_path) == 21
    assert copy_rates.distance(0, tmp_path) == 10
    assert copy_rates.distance(7, tmp_path) is None
    assert copy_rates.distance(None, tmp_path) is None


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if resources.read().gpus:
        pytest.skip("there is one")
    assert main.main(["check"]) == 0
    assert "there is no accelerator" in capsys.readouterr().out.replace("\n", " ")
    assert main.main(["check", "--plot", str(tmp_path / "a.svg")]) == 2
    assert "none that CUDA reaches" in capsys.readouterr().err
    monkeypatch.setattr(copy_rates, "CudaBench", Bench)
    monkeypatch.setattr(resources, "gpus", lambda: [resources.Gpu("Stand-in", 1 << 34, 1 << 34, None)])
    plot = tmp_path / "a.svg"
    assert main.main(["check", "--json", "--plot", str(plot)]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["copies"]["device"] == "Stand-in <1>"
    assert out["pin_memory"].startswith("pin_memory=")
    ET.fromstring(plot.read_text())
