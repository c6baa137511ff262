"""What makes tests quick. The library is compiled once: where bytecode is not kept, each process they start would."""

from __future__ import annotations

import compileall
from pathlib import Path

import pytest

import stoker

compileall.compile_dir(Path(stoker.__file__).parent, quiet=2)


@pytest.fixture
def quick_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """``num_workers="auto"`` measures for an instant, in tests that do not ask how well it chooses."""
    monkeypatch.setattr("stoker.tuning.probe.WINDOW_S", 0.02)
