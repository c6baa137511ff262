"""One folder of data for all scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from .data import make


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("scripts") / "data")
