"""What may change between two runs and reach a sample, so that the second must not find the first one's cache."""

from __future__ import annotations

import contextvars
import enum
import functools
import importlib
import json
import os
import sqlite3
import sys
import types
from collections.abc import Callable
from configparser import ConfigParser
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import Dataset

from stoker.core.errors import UsageError
from stoker.staging.dataset import Staged
from stoker.staging.libraries_used import versions_of

N = 40
RARE = 37  # a sample that no trial makes


class Numbers(Dataset[Any]):
    """Sample RARE alone is made by ``rare``."""

    def __init__(self, rare: Callable[[Any, float], Any], **more: Any) -> None:
        self.rare = rare
        self.__dict__.update(more)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.full((64,), float(i)).exp().log()
        if i == RARE:
            x = x * self.rare(self, 2.0)
        return x + torch.rand(64)


def key(data: Any, base: Path) -> str:
    """The key of a cache that would be kept. Raises UsageError if it has none."""
    return json.dumps(Staged(data, cache="ram")._key(kept_in=base), sort_keys=True)


class Gain(enum.Enum):
    SOFT = 1.5
    HARD = 3.0


class Model(torch.nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.tensor(gain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.hidden


class Options(ConfigParser):
    pass


class Counts(HTMLParser):
    weight = 1.5

    def handle_data(self, data: str) -> None:
        self.n = len(data) * self.weight


def count(text: str) -> float:
    parser = Counts()
    parser.feed(text)
    return parser.n


def register(name: str) -> Callable[[type], type]:
    return lambda cls: REGISTRY.setdefault(name, cls)


REGISTRY: dict[str, type] = {}


@register("b")
class Registered:
    def __call__(self, x: float) -> float:
        return self._deep(x)

    def _deep(self, x: float) -> float:
        return x * 1.5


class Where:
    """A class whose attributes are named only when it runs."""

    def __init__(self, **more: float) -> None:
        for name, value in more.items():
            setattr(self, f"x_{name}", value)

    def __getitem__(self, name: str) -> float:
        return object.__getattribute__(self, f"x_{name}")  # type: ignore[no-any-return]


def options(gain: str) -> Options:
    found = Options()
    found.read_string(f"[a]\ngain = {gain}\n")
    return found


GAIN, PARSED, MODEL, WHERE = Gain, options("1.5"), Model(1.5), Where(gain=1.5)
FOLDER, NAMES = Path(), [""]


def set_in_module(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(sys.modules[__name__], name, value)


def method(cls: type, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(cls, name, value, raising=False)


def twice(self: Any, *args: Any) -> Any:
    return 2.0


def decode(self: Any, text: str) -> Any:
    return json.JSONDecoder.raw_decode(self, text)[0]


def handler(*args: Any) -> None:
    pass


def registered_in_library(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(json, "hooks", [twice], raising=False)


def of_numpy(patch: pytest.MonkeyPatch) -> None:
    np.seterrcall(handler)


CHANGES = {
    "enum by name": (lambda self, x: GAIN[["SOFT", "HARD"][1]].value, method(Gain, "_member_map_", {"HARD": 2.0})),
    "model": (lambda self, x: MODEL(torch.tensor(x)), set_in_module("MODEL", Model(1.25))),
    "method that a library calls": (lambda self, x: count("ab"), method(Counts, "handle_data", twice)),
    "attribute that it reads": (lambda self, x: count("ab"), method(Counts, "weight", 1.25)),
    "options": (lambda self, x: float(PARSED["a"]["gain"]), set_in_module("PARSED", options("1.25"))),
    "class in a registry": (lambda self, x: REGISTRY["b"]()(x), method(Registered, "_deep", twice)),
    "attribute by name": (lambda self, x: WHERE["gain"], set_in_module("WHERE", Where(gain=1.25))),
    "method of a library": (lambda self, x: Image.new("L", (2, 2)).rotate(x), method(Image.Image, "rotate", twice)),
    "method of a tensor": (lambda self, x: torch.ones(2).scaled(x), method(torch.Tensor, "scaled", twice)),
    "method deep in the library": (lambda self, x: json.loads("1"), method(json.JSONDecoder, "decode", decode)),
    "function in a list of a library": (lambda self, x: json.loads("1"), registered_in_library),
    "handler of errors": (lambda self, x: np.float32(1) / np.float32(x), of_numpy),
    "setting of a library": (lambda self, x: Image.new("L", (2, 2)).size[0], method(ImageFile, "MAXBLOCK", 99)),  # type: ignore[arg-type]
    "variable of the environment": (
        lambda self, x: float(os.getenvb(b"RARE_GAIN") or 1),
        lambda patch: patch.setenv("RARE_GAIN", "3"),
    ),
    "variable that native code reads": (
        lambda self, x: np.exp(x),
        lambda patch: patch.setenv("NPY_DISABLE_CPU_FEATURES", "AVX2"),
    ),
    "working folder": (lambda self, x: len(os.getcwd()), lambda patch: patch.chdir("/")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_rare_sample_reads_changes_the_key(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rare, change = CHANGES[name]
    first, same = key(Numbers(rare), tmp_path), key(Numbers(rare), tmp_path)
    assert first == same
    with monkeypatch.context() as patch:
        change(patch)
        assert key(Numbers(rare), tmp_path) != first
    np.seterrcall(None)
    assert key(Numbers(rare), tmp_path) == first


def test_a_folder_of_modules_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3 imports a folder without __init__.py as a module without a file."""
    monkeypatch.setitem(sys.modules, "tests.a_folder", types.ModuleType("tests.a_folder"))
    assert set(versions_of({"tests", "numpy"})) == {"numpy"}


def read_folder(self: Any, x: float) -> float:
    return float((FOLDER / "rare.txt").read_text())


def read_list(self: Any, x: float) -> float:
    return float(Path(NAMES[0]).read_text())


def read_variable(self: Any, x: float) -> float:
    return float((Path(os.environ["RARE_FOLDER"]) / "rare.txt").read_text())


def is_there(self: Any, x: float) -> float:
    return float((FOLDER / "masks").exists())


@pytest.mark.parametrize("rare", [read_folder, read_list, read_variable, is_there])
def test_a_file_that_only_a_rare_sample_opens_changes_the_key(
    rare: Callable[[Any, float], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "rare.txt").write_text("1.5")
    monkeypatch.setattr(sys.modules[__name__], "FOLDER", folder / ("masks" if rare is is_there else ""))
    monkeypatch.setattr(sys.modules[__name__], "NAMES", [str(folder / "rare.txt")])
    monkeypatch.setenv("RARE_FOLDER", str(folder))
    first = key(Numbers(rare), tmp_path)
    assert key(Numbers(rare), tmp_path) == first
    (folder / "masks").mkdir() if rare is is_there else (folder / "rare.txt").write_text("2.5")
    assert key(Numbers(rare), tmp_path) != first


def test_a_file_behind_a_descriptor_changes_the_key(tmp_path: Path) -> None:
    file = tmp_path / "pack.bin"
    file.write_bytes(b"12345678")
    fd = os.open(file, os.O_RDONLY)
    try:
        data = Numbers(lambda self, x: os.pread(self.shards[0], 1, 3)[0], shards=[fd])
        first = key(data, tmp_path / "caches")
        assert key(data, tmp_path / "caches") == first
        os.utime(file, (1, 1))
        assert key(data, tmp_path / "caches") != first
    finally:
        os.close(fd)


@functools.cache
def cached(x: float) -> float:
    return x * 1.5


def by_name(self: Any, x: float) -> float:
    return getattr(importlib.import_module("ma" + "th"), "sqrt")(x)  # type: ignore[no-any-return]  # noqa: B009


def by_expression(self: Any, x: float) -> float:
    return eval("x * 2")  # type: ignore[no-any-return]


def by_global_name(self: Any, x: float) -> float:
    return globals()["twi" + "ce"](self, x)  # type: ignore[no-any-return]


def by_cache(self: Any, x: float) -> float:
    return cached(x)


def reads(self: Any, x: float) -> float:
    return x if self.held is not None else 1.0


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "import_module": (lambda: Numbers(by_name), "by_name uses import_module"),
    "eval": (lambda: Numbers(by_expression), "uses eval"),
    "globals": (lambda: Numbers(by_global_name), "uses globals"),
    "calls before the first epoch": (lambda: (cached(2.0), Numbers(by_cache))[1], "cached caches"),
    "connection": (lambda: Numbers(reads, held=sqlite3.connect(":memory:")), "Connection|connection"),
    "context": (lambda: Numbers(reads, held=contextvars.ContextVar("var")), "ContextVar"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_not_kept(name: str, tmp_path: Path) -> None:
    make, why = REFUSED[name]
    with pytest.raises(UsageError, match=why):
        key(make(), tmp_path)


def test_a_module_that_answers_for_names_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("answers")
    code = "V = {'GAIN': 3}\ndef __getattr__(name):\n    if name not in V: raise AttributeError(name)\n    return V[name] * %d\n"
    monkeypatch.setitem(sys.modules, "answers", module)
    exec(code % 2, vars(module))
    monkeypatch.setattr(sys.modules[__name__], "json", module)
    data = Numbers(lambda self, x: json.GAIN)  # type: ignore[attr-defined]
    dumps = importlib.import_module("json").dumps
    keys = []
    for k in (2, 2, 4):
        exec(code % k, vars(module))
        keys.append(dumps(Staged(data, cache="ram")._key(kept_in=tmp_path), sort_keys=True))
    assert keys[0] == keys[1] != keys[2]


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x.exp().log()
        return x * self.by


class Noise:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(64) * self.by


class Chain:
    def __init__(self, *steps: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.steps = list(steps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x)
        return x


class Augmented(Dataset[Any]):
    def __init__(self, prepare: float = 2.0, noise: float = 0.1) -> None:
        self.prepare, self.noise = Scale(prepare), Noise(noise)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        x = self.prepare(torch.full((64,), float(i)))
        return self.noise(x)


class Chained(Augmented):
    def __init__(self, prepare: float = 2.0, noise: float = 0.1) -> None:
        self.transform = Chain(Scale(prepare), Noise(noise))

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.transform(torch.full((64,), float(i)))


@pytest.mark.parametrize("kind", [Augmented, Chained])
def test_what_only_the_random_part_reads_changes_no_key(
    kind: type[Augmented], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = key(kind(), tmp_path)
    assert key(kind(noise=0.3), tmp_path) == first
    assert key(kind(prepare=3.0), tmp_path) != first
    with monkeypatch.context() as patch:
        patch.setattr(Noise, "__call__", lambda self, x: x * torch.rand(64) - self.by)
        assert key(kind(), tmp_path) == first
    with monkeypatch.context() as patch:
        patch.setattr(Scale, "__call__", lambda self, x: x * self.by)
        assert key(kind(), tmp_path) != first


def test_what_the_random_part_needs_of_the_other_changes_the_key(tmp_path: Path) -> None:
    def one(self: Any, i: int) -> torch.Tensor:
        made = [self.prepare(torch.full((64,), k)) for k in (float(i), 1.0)]
        a = made[0]
        return self.noise(a) + 0 * len(made[1])  # type: ignore[no-any-return]

    def two(self: Any, i: int) -> torch.Tensor:
        made = [self.prepare(torch.full((64,), k)) for k in (float(i), 1.0)]
        a, b = made
        return self.noise(b) + 0 * len(a)  # type: ignore[no-any-return]

    keys = []
    for body in (one, one, two):
        body.__name__, body.__qualname__ = "__getitem__", "Augmented.__getitem__"
        keys.append(key(type("Augmented", (Augmented,), {"__getitem__": body, "__module__": __name__})(), tmp_path))
    assert keys[0] == keys[1] != keys[2]
