"""What counts as a change of a dataset's arrays. Changes as scripts make them: tests/staging, tests/scripts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from stoker.core.fingerprint import SUMMED_BYTES, Fingerprint


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *[(shape, "int64") for shape in ((7,), (100_003,), (1_000, 13), (SUMMED_BYTES // 8,))],
        *[((1_000, 13), dtype) for dtype in ("float32", "uint8", "U3", "M8[s]")],
    ],
)
def test_one_value_of_an_array_in_memory_that_changes_is_seen(shape: tuple[int, ...], dtype: str) -> None:
    x = np.ones(shape, "int64").astype(dtype)
    for at in (0, x.size // 3, x.size - 1):
        before = Fingerprint(SimpleNamespace(labels=x))
        x.reshape(-1)[at] = np.zeros((), "int64").astype(dtype)
        assert before.changed(SimpleNamespace(labels=x)) == ["dataset.labels"], at


def test_an_array_that_is_shuffled_is_seen() -> None:
    x = np.arange(100_000)
    before = Fingerprint(SimpleNamespace(rows=x))
    np.random.default_rng(1).shuffle(x)
    assert before.changed(SimpleNamespace(rows=x))


def test_a_file_that_is_mapped_into_memory_is_not_read_as_a_whole(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", np.int64, "w+", shape=(100_000,))
    for x in (mapped, np.asarray(mapped)):
        before = Fingerprint(SimpleNamespace(rows=x))
        mapped[777] += 1
        assert not before.changed(SimpleNamespace(rows=x))
