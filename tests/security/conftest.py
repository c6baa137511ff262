"""A folder for several users. pytest's own are its user's alone, and each run of pytest sets their modes anew."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def temp() -> Iterator[Path]:
    """A temp folder of all users, as /tmp is."""
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        made.chmod(0o1777)
        yield made
