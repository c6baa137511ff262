"""Served samples are not made again for comparison here: tests count how often samples are made."""

from __future__ import annotations

import pytest

from stoker.staging import change_watch


@pytest.fixture(autouse=True)
def _nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_watch, "COMPARED", 0)
