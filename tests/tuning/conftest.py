"""Loaders behind ``--apply`` in the tests' own process."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any

import pytest
from torch.utils.data import DataLoader

from stoker.tuning import apply, cache_pays, given_workers, managed_dataset


def put_behind_apply(cls: type[DataLoader[Any]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Loaders of a class get what ``--apply`` decides. Trials are waited for, and a comparison may take any time. Returns
    the entries of the report."""
    for name, value in {
        "_datasets": [],
        "_entries": {},
        "_made": deque(),
        "_vain": [],
        "_lost": [],
        "_used_once": Counter(),
        "_tried_s": [],
        "_released": [],
        "_kept_by_script": set(),
        "keep_freed_memory": lambda: None,
    }.items():
        monkeypatch.setattr(apply, name, value)
    monkeypatch.setattr(apply, "_with_gradients", set())
    monkeypatch.setattr(apply, "TRIAL_SHARE", math.inf)  # scripts take little time here
    for name in ("WAIT_S", "HERE_WAIT_S", "LONG_WAIT_S"):
        monkeypatch.setattr(apply, name, 60.0)
    for name in ("WAIT_SHARE", "MUCH_S"):  # epochs take little time here
        monkeypatch.setattr(managed_dataset, name, math.inf)
    monkeypatch.setattr(cache_pays, "LITTLE_S", math.inf)
    monkeypatch.setattr(given_workers, "MOST_SHARE", 1e9)  # batches take little time here
    monkeypatch.setattr(cls, "_get_iterator", DataLoader._get_iterator)
    out: dict[str, Any] = {}
    cls._get_iterator = apply.begin(out)  # type: ignore[method-assign,assignment]
    return out
