"""What cannot be pickled is found without a copy of the object."""

from __future__ import annotations

import os
import threading
import tracemalloc
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.picklable import MAX_ITEMS, culprit, refused
from stoker.workers.can_start import can_start_elsewhere
from stoker.workers.handover import Pickled


class Data(torch.utils.data.Dataset):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 8


def peak(call: Any, *args: Any) -> tuple[Any, int]:
    tracemalloc.start()
    try:
        return call(*args), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def large() -> Data:
    rows = [{"path": f"{i}.jpg", "text": str(i) * 50} for i in range(100_000)]
    return Data(rows=rows, by_name={str(i): [i] for i in range(100_000)}, raw=bytes(50 << 20))


@pytest.mark.slow
def test_a_large_dataset_is_not_copied() -> None:
    data = large()
    for call, args in ((refused, (data,)), (can_start_elsewhere, (data,)), (culprit, (data, "dataset"))):
        found, most = peak(call, *args)
        assert found in (None, True)
        assert most < 8 << 20


def test_arrays_on_disk_are_not_read(tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "a", np.uint8, "w+", shape=(1 << 34,))  # a file with a hole
    assert peak(refused, Data(array=array, tensor=torch.zeros(1 << 24)))[1] < 1 << 20


@pytest.mark.parametrize(
    "hidden",
    [
        lambda lock: {"last": lock},
        lambda lock: {"items": [lock] * (MAX_ITEMS + 1)},
        lambda lock: {"items": {i: {"deep": (1, lock)} for i in range(MAX_ITEMS + 1)}},
        lambda lock: {"items": np.array([lock] * (MAX_ITEMS + 1), object)},
    ],
)
def test_what_lies_behind_long_containers_is_found(hidden: Any) -> None:
    data = Data(rows=[{"i": i} for i in range(10 * MAX_ITEMS)], **hidden(threading.Lock()))
    assert "cannot pickle '_thread.lock' object" in str(refused(data))
    assert not can_start_elsewhere(data)
    assert str(culprit(data, "dataset")).startswith(("dataset.last", "dataset.items"))


VALUES = st.recursive(
    st.none()
    | st.integers()
    | st.binary()
    | st.text()
    | st.builds(threading.Lock)
    | st.just(lambda: 1)
    | st.just(print),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@given(VALUES)
@settings(max_examples=20)
def test_it_says_what_pickle_says(value: Any) -> None:
    try:
        ForkingPickler.dumps(value)
        said = None
    except Exception as e:
        said = e
    found = refused(value)
    assert (type(found), str(found)) == (type(said), str(said))


def test_a_dataset_is_pickled_once_for_workers_that_are_spawned() -> None:
    rows = [bytes(1 << 20) for _ in range(32)]
    pickled, most = peak(Pickled, rows)
    try:
        assert most < 8 << 20
        assert pickled.load() == rows
    finally:
        pickled.close()


def test_what_cannot_be_pickled_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TypeError):
        Pickled([threading.Lock()])
    assert os.listdir("/proc/self/fd") == before
