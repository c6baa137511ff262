"""Drawn datasets that read values in drawn places, and drawn changes between epochs: never a wrong bit.

``CHANGES=1000 python -m pytest -m "" tests/exact/test_drawn_changes.py`` tries more of them.
"""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import functools
import os
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker.core.compare import equal_bits
from stoker.staging import change_watch

SEED = int(os.environ.get("STOKER_SEED", "0"))
DRAWS = int(os.environ.get("CHANGES", "24"))
N, EPOCHS = 12, 4
GLOBAL = {"value": 1.0, "values": [1.0] * N}
MODULE = types.ModuleType("drawn_settings")


@dataclasses.dataclass
class Record:
    value: float = 1.0
    inner: Any = None


class Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Settings:
    value = 1.0

    class Nested:
        value = 1.0


class Described:
    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, held: Any, owner: type) -> Any:
        return held.__dict__[self.name]


class Helper:
    shown = Described()

    def __init__(self) -> None:
        self._shown, self.factor = 1.0, 1.0

    @property
    def doubled(self) -> float:
        return self.factor * 2

    def __call__(self, x: float) -> float:
        return x * self.factor


class Mapping(collections.UserDict[str, float]):
    """A mapping with a class of its own."""


def by_default(i: int, values: list[float] = [1.0] * N) -> float:
    return values[i]


def by_keyword(i: int, *, scale: float = 1.0) -> float:
    return scale * (i + 1)


def closure() -> tuple[Callable[[int], float], Callable[[float], None]]:
    held = [1.0] * N

    def read(i: int) -> float:
        return held[i]

    def change(x: float) -> None:
        held[N // 2] = x

    return read, change


class Data(Dataset[Any]):
    """``places``: what it reads, by number."""

    def __init__(self, places: list[int]) -> None:
        GLOBAL.update(value=1.0, values=[1.0] * N)
        Settings.value = Settings.Nested.value = MODULE.__dict__["value"] = 1.0
        by_default.__defaults__ = ([1.0] * N,)
        by_keyword.__kwdefaults__ = {"scale": 1.0}
        self.places = places
        self.number, self.numbers, self.text = 1.0, [1.0] * N, "1.0"
        self.records = [{"value": 1.0, "name": str(k)} for k in range(N)]
        self.objects = [Record() for _ in range(N)]
        self.nested = Record(inner=Record(inner={"deep": [Record()]}))
        self.slots, self.helper, self.mapping = Slots(), Helper(), Mapping(value=1.0)
        self.array, self.tensor = np.ones(N), torch.ones(N, dtype=torch.float64)
        self.view, self.bytes = self.array[::2], bytearray(N)
        self.typed, self.ends = array.array("d", [1.0] * N), collections.deque([1.0] * N)
        self.chosen = {1.0}
        self.partial = functools.partial(by_keyword, scale=1.0)
        self.read, self.change_held = closure()
        self.objects_in_array = np.array([Record() for _ in range(N)], dtype=object)
        self.maybe: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        x = torch.full((8, 8), float(i + 1), dtype=torch.float64)
        for _ in range(20):
            x = torch.sqrt(x + 1) * 1.5
        for place in self.places:
            x = x + float(PLACES[place][0](self, i))
        return x


# How a place is read, and how its value is changed.
PLACES: list[tuple[Callable[[Any, int], Any], Callable[[Any, float], Any]]] = [
    (lambda d, i: d.number, lambda d, x: setattr(d, "number", x)),
    (lambda d, i: d.numbers[i], lambda d, x: d.numbers.__setitem__(3, x)),
    (lambda d, i: d.text, lambda d, x: setattr(d, "text", str(x))),
    (lambda d, i: d.records[i]["value"], lambda d, x: d.records[5].update(value=x)),
    (lambda d, i: d.objects[i].value, lambda d, x: setattr(d.objects[7], "value", x)),
    (
        lambda d, i: d.nested.inner.inner["deep"][0].value,
        lambda d, x: setattr(d.nested.inner.inner["deep"][0], "value", x),
    ),
    (lambda d, i: d.slots.value, lambda d, x: setattr(d.slots, "value", x)),
    (lambda d, i: d.helper.doubled, lambda d, x: setattr(d.helper, "factor", x)),
    (lambda d, i: d.helper(i), lambda d, x: setattr(d.helper, "factor", x)),
    (lambda d, i: d.helper.shown, lambda d, x: setattr(d.helper, "_shown", x)),
    (lambda d, i: d.mapping["value"], lambda d, x: d.mapping.update(value=x)),
    (lambda d, i: d.array[i], lambda d, x: d.array.__setitem__(4, x)),
    (lambda d, i: d.view[i // 2], lambda d, x: d.array.__setitem__(4, x)),
    (lambda d, i: d.tensor[i], lambda d, x: d.tensor.data[2].fill_(x)),
    (lambda d, i: d.bytes[i], lambda d, x: d.bytes.__setitem__(9, int(x) % 256)),
    (lambda d, i: d.typed[i], lambda d, x: d.typed.__setitem__(9, x)),
    (lambda d, i: d.ends[i], lambda d, x: d.ends.rotate(1) or d.ends.__setitem__(0, x)),
    (lambda d, i: sum(d.chosen), lambda d, x: d.chosen.add(x)),
    (lambda d, i: d.partial(i), lambda d, x: d.partial.keywords.update(scale=x)),
    (lambda d, i: d.read(i), lambda d, x: d.change_held(x)),
    (lambda d, i: d.objects_in_array[i].value, lambda d, x: setattr(d.objects_in_array[1], "value", x)),
    (lambda d, i: d.maybe or 0.0, lambda d, x: setattr(d, "maybe", None if d.maybe else x)),
    (lambda d, i: GLOBAL["value"], lambda d, x: GLOBAL.update(value=x)),
    (lambda d, i: GLOBAL["values"][i], lambda d, x: GLOBAL["values"].__setitem__(6, x)),  # type: ignore[index,attr-defined]
    (lambda d, i: Settings.value, lambda d, x: setattr(Settings, "value", x)),
    (lambda d, i: Settings.Nested.value, lambda d, x: setattr(Settings.Nested, "value", x)),
    (lambda d, i: by_default(i), lambda d, x: by_default.__defaults__[0].__setitem__(8, x)),  # type: ignore[index]
    (lambda d, i: by_keyword(i), lambda d, x: by_keyword.__kwdefaults__.update(scale=x)),  # type: ignore[union-attr]
    (lambda d, i: d.objects[i].value, lambda d, x: setattr(d, "objects", copy.deepcopy(d.objects[::-1]))),
]


def run(seed: int, staged: bool, workers: int) -> list[Any]:
    rng = random.Random(seed)
    data: Any = Data(rng.sample(range(len(PLACES)), rng.randint(1, 6)))
    asked = stoker.Staged(data, cache_budget="10MB") if staged else data
    loader = DataLoader(asked, 4, num_workers=workers)
    out = []
    for _ in range(EPOCHS):
        out.append(list(loader))
        for _ in range(rng.choice([0, 1, 1, 3])):
            # Mostly a place that is read: else a change must not be noticed either.
            place = rng.choice(data.places) if rng.random() < 0.8 else rng.randrange(len(PLACES))
            PLACES[place][1](data, float(rng.randint(2, 200)))
    return out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_never_a_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_watch, "COMPARED", 0)
    kept = 0
    for k in range(DRAWS):
        seed = 1000 * SEED + k
        print("seed", seed)
        workers = 2 if k % 10 == 9 else 0
        plain = run(seed, False, workers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", stoker.StokerWarning)
            try:
                made = run(seed, True, workers)
            except stoker.UsageError as e:
                print("not kept:", e)
                continue
        kept += 1
        assert equal_bits(plain, made), f"seed {seed}"
    assert kept > DRAWS // 2
