"""The settings of the interpreter and its libraries that cases change are put back: caches that other tests keep on
disk depend on them."""

import decimal
import sys
from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    with np.printoptions(), decimal.localcontext():
        yield
