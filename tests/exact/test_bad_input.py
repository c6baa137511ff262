"""Datasets that no digest can be made of, or that lie to it: right samples, a reason, and no error of stoker's."""

from __future__ import annotations

import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.core.compare import equal_bits
from stoker.staging import change_watch, inputs, value_digests
from stoker.staging.inputs import Inputs
from stoker.staging.source_files import SourceFiles

N = 12


@pytest.fixture(autouse=True)
def _nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_watch, "COMPARED", 0)


class _Data(Dataset[Any]):
    held: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.full((8,), float(i + 1)).exp().log() * self.scale()

    def scale(self) -> float:
        return 1.0


def epochs(data: Any, change: Any, count: int = 3) -> tuple[list[Any], str]:
    """Samples with a cache, by epoch, each beside that of the dataset; and why nothing is kept."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stoker.StokerWarning)
        try:
            staged: Any = stoker.Staged(data, cache_budget="10MB")
        except stoker.StokerError as e:
            staged, reason = data, str(e)
        else:
            reason = ""
        out = []
        for epoch in range(count):
            change(epoch)
            made = [staged[i] for i in range(N)]
            out.append((made, [data[i] for i in range(N)]))
    return out, reason


def assert_right(data: Any, change: Any) -> str:
    made, reason = epochs(data, change)
    for with_cache, plain in made:
        assert equal_bits(with_cache, plain)
    return reason


class _EqualToAll:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return "the same"


class _HasEqual(_Data):
    def scale(self) -> float:
        return float(self.held[0].scale + next(iter(self.mapped)).scale)


def test_objects_that_say_they_are_equal() -> None:
    data = _HasEqual()

    def change(epoch: int) -> None:
        data.held, data.mapped = (_EqualToAll(1.0 + epoch),), {_EqualToAll(2.0 * epoch): 1}

    change(0)
    assert not assert_right(data, change)


class _NoTruth(_EqualToAll):
    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("not comparable")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ArithmeticError("neither")

    def __repr__(self) -> str:
        raise ArithmeticError("cannot be described")


class _HasNoTruth(_Data):
    def scale(self) -> float:
        return float(self.held.scale)


def test_objects_that_cannot_be_compared() -> None:
    data = _HasNoTruth()
    data.held = _NoTruth(1.0)

    def change(epoch: int) -> None:
        data.held.scale = 1.0 + epoch

    assert not assert_right(data, change)


class _Reduces:
    """Says that it has no state, or fails, or counts who asks."""

    asked = 0

    def __init__(self, fails: bool) -> None:
        self.scale, self.fails = 1.0, fails

    def __reduce_ex__(self, protocol: Any) -> Any:
        _Reduces.asked += 1
        if self.fails:
            raise ArithmeticError("not to be pickled")
        return _Reduces, (False,)


@pytest.mark.few(1)
@pytest.mark.parametrize("fails", [False, True])
def test_what_reducing_an_object_says_does_not_count(fails: bool) -> None:
    data = _HasNoTruth()
    data.held = _Reduces(fails)
    _Reduces.asked = 0

    def change(epoch: int) -> None:
        data.held.scale = 1.0 + epoch

    assert not assert_right(data, change)
    assert not _Reduces.asked


class _HasAnArray(_Data):
    def __init__(self) -> None:
        self.held = np.ones((N, 64))

    def __getitem__(self, i: int) -> Any:
        return torch.full((8,), float(i)).exp().log() * self.held[i, 0]


def test_what_takes_too_long_to_compare_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_digests, "MOST_BYTES", 1 << 10)
    data = _HasAnArray()

    def change(epoch: int) -> None:
        data.held[3] = epoch

    assert "takes too long to compare" in assert_right(data, change)


class _HoldsItself(_Data):
    def __init__(self) -> None:
        self.others: list[Any] = [self]
        self.others.append(self.others)
        self.held = 1.0

    def scale(self) -> float:
        return float(self.others[0].others[1][0].held)


def test_a_dataset_that_holds_itself() -> None:
    data = _HoldsItself()

    def change(epoch: int) -> None:
        data.held = 1.0 + epoch

    assert_right(data, change)


class _Nested(_Data):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getitem__(self, i: int) -> Any:
        return torch.full((8,), float(i)).exp().log() if self.inner is None else self.inner[i] * 1.0


def test_datasets_within_datasets_without_end() -> None:
    data: Any = None
    for _ in range(inputs.DEPTH + 20):
        data = _Nested(data)
    assert "is nested too deeply" in assert_right(data, lambda _: None)


class _ReadsFiles(_Data):
    def __init__(self, folder: Path) -> None:
        self.paths = [folder / f"{i}.txt" for i in range(N)]
        for path in self.paths:
            path.write_text("1")

    def __getitem__(self, i: int) -> Any:
        scale = float(self.paths[i].read_text()) if self.paths[i].exists() else 7.0
        return torch.full((8,), float(i)).exp().log() * scale


def test_files_that_vanish_and_come_back(tmp_path: Path) -> None:
    data = _ReadsFiles(tmp_path)

    def change(epoch: int) -> None:
        if epoch == 1:
            data.paths[3].unlink()
        if epoch == 2:
            data.paths[3].write_text("5")

    assert not assert_right(data, change)


def test_files_that_vanish_while_they_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _ReadsFiles(tmp_path)
    files = SourceFiles(data, {str(tmp_path): {".txt"}}, map(str, data.paths))
    listed = sys.modules[SourceFiles.__module__]._list  # type: ignore[attr-defined]

    def lists(*args: Any) -> None:
        listed(*args)
        data.paths[5].unlink(missing_ok=True)

    monkeypatch.setattr(sys.modules[SourceFiles.__module__], "_list", lists)
    files.changes()
    assert files.changes() == [str(data.paths[5])]


def test_clocks_that_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _ReadsFiles(tmp_path)
    jumps = iter(range(10**9))
    real = time.monotonic

    def change(epoch: int) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: real() + 1e6 * (-1) ** next(jumps))
        monkeypatch.setattr(time, "time", lambda: -1e9 * next(jumps))
        data.paths[3].write_text(str(epoch))

    made, _ = epochs(data, lambda _: None, 1)
    assert equal_bits(*made[0])
    assert_right(data, change)


class _Scaled(_Data):
    held = 1.0

    def scale(self) -> float:
        return float(self.held)


@pytest.mark.slow
def test_a_thread_changes_the_dataset_while_it_is_digested() -> None:
    data: Any = _Scaled()
    data.held = 1.0
    data.table = dict.fromkeys(range(300), 1.0)
    ends = threading.Event()

    def run() -> None:
        k = 300
        while not ends.is_set():
            data.table[k] = data.table.pop(k - 300, 1.0)
            k += 1

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        for _ in range(50):
            Inputs(data)  # raises nothing
        assert_right(data, lambda epoch: setattr(data, "held", 1.0 + epoch))
    finally:
        ends.set()
        thread.join(10)


SOURCE = """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, i):
        x = torch.full((8,), float(i)).exp().log()
        return x * FACTOR
"""


def test_the_source_was_changed_since_it_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "exact_edited.py"
    path.write_text(SOURCE.replace("FACTOR", "2.0"))
    monkeypatch.syspath_prepend(str(tmp_path))
    module: Any = __import__("exact_edited")
    path.write_text("\n\n\n" + SOURCE.replace("FACTOR", "torch.rand(8)").replace("x = ", "y = 0; x = "))
    made, _ = epochs(module.Data(), lambda _: None)
    for with_cache, plain in made:
        assert equal_bits(with_cache, plain)
    monkeypatch.delitem(sys.modules, "exact_edited")


def test_a_cell_that_is_run_again() -> None:
    """Its functions come from ``exec``, and the object is made of the class before."""
    module = types.ModuleType("exact_cell")
    sys.modules["exact_cell"] = module
    exec(SOURCE, vars(module))
    module.FACTOR = 2.0  # type: ignore[attr-defined]
    data: Any = module.Data()

    def change(epoch: int) -> None:
        if epoch == 1:
            exec(SOURCE.replace("float(i)", "float(i + 1)"), vars(module))
            data.__class__ = module.Data
        module.FACTOR = 2.0 + epoch  # type: ignore[attr-defined]

    try:
        assert_right(data, change)
    finally:
        del sys.modules["exact_cell"]
