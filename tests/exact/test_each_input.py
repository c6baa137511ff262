"""Each kind of input that is recorded is needed: without it a dataset of ``cases`` gets wrong samples."""

from __future__ import annotations

import random
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from stoker.core.compare import equal_bits
from stoker.staging import change_watch, samples, value_digests
from stoker.staging.inputs import Inputs
from stoker.staging.source_files import SourceFiles
from stoker.staging.users_code import names_in

from .cases import CASES
from .test_cases import EPOCHS, epochs, folder, seed

pytestmark = pytest.mark.slow
CHANGED = [  # by the loop, so that an entry of ``Inputs`` differs
    "LabelsInManyRecords",
    "WeightsInDataclasses",
    "SwitchedOff",
    "SettingsOfAClass",
    "DefaultArgument",
    "GlobalBySubscript",
    "Environment",
    "ChainOfMaps",
    "BankOfArrays",
    "TensorsInAList",
    "HelperWithSlots",
    "HelpersInADictionary",
    "BehindADescriptor",
    "MethodReplaced",
]


def are_right(name: str, where: Path) -> bool:
    """Whether cached samples are those that the dataset makes."""
    seed(1)
    data = CASES[name](folder(where / "plain"))
    plain = list(epochs(data, data, 0))
    seed(1)
    data = CASES[name](folder(where / "staged"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stoker.StokerWarning)
        made = list(epochs(data, stoker.Staged(data, cache_budget="10MB"), 0))
    return all(equal_bits(made[epoch], plain[epoch]) for epoch in range(EPOCHS))


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_watch, "COMPARED", 0)
    monkeypatch.setenv("EXACT_SCALE", "1")


@pytest.mark.parametrize("name", CHANGED)
def test_what_the_loop_changes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data: Any = CASES[name](folder(tmp_path / "looked at"))
    begun, changed = Inputs(data), set()
    for epoch in range(EPOCHS):
        data.between(epoch)
        now = Inputs(data)
        changed |= {p for p in {**begun.entries, **now.entries} if begun.entries.get(p) != now.entries.get(p)}
    assert changed
    monkeypatch.undo()
    monkeypatch.setattr(change_watch, "COMPARED", 0)
    monkeypatch.setenv("EXACT_SCALE", "1")
    made = Inputs.__init__

    def without(self: Inputs, *args: Any, **settings: Any) -> None:
        made(self, *args, **settings)
        for path in changed & self.entries.keys():
            del self.entries[path]

    monkeypatch.setattr(Inputs, "__init__", without)
    assert not are_right(name, tmp_path)


@pytest.mark.parametrize("name", ["FilesWrittenAnew", "FilesBesideThoseNamed"])
def test_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SourceFiles, "changes", lambda _: [])
    assert not are_right(name, tmp_path)


def test_a_large_map_of_a_file_is_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second write to a page, which the kernel has not written back yet, does not change the file's times."""
    monkeypatch.setattr(value_digests, "MOST_MAPPED_BYTES", 16)
    data = types.SimpleNamespace(table=np.memmap(tmp_path / "table", np.float32, "w+", shape=(8192,)))
    for k in range(4):
        data.table[k] = 1
        before = Inputs(data)
        data.table[k] = 7
        assert before.changes(Inputs(data))


LIMIT = 3


def test_a_text_names_a_variable() -> None:
    def chosen(frame: Any) -> Any:
        return frame.query("x > @LIMIT")

    def asked(frame: Any) -> Any:
        return frame.find("x > @LIMIT")

    assert [("LIMIT" in names_in(fn.__code__)[0]) for fn in (chosen, asked)] == [True, False]


def test_a_generator_of_an_unknown_library() -> None:
    native = types.ModuleType("native")
    native.__file__ = np.__file__
    native.randn = lambda: 0.5  # type: ignore[attr-defined]
    scope = {"native": native, "np": np, "random": random}
    codes = {"native.randn()": "native.randn", "np.random.rand()": "", "random.random()": "", "native.sum()": ""}
    made = {text: types.FunctionType(compile(text, "data.py", "eval"), scope) for text in codes}
    assert {text: samples._foreign_generator(fn) for text, fn in made.items()} == codes
