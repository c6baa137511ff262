"""Trials that give way to no other work: the tests here wait for them, beside other tests."""

from __future__ import annotations

import pytest

from stoker.staging import isolate


@pytest.fixture(autouse=True)
def _trials_at_full_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "NICE", 0)
