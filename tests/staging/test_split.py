"""What is deterministic is found, reported, and never what is random."""

from __future__ import annotations

import contextlib
import decimal
import functools
import itertools
import os
import random
import re
import secrets
import sys
import time
import uuid
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import stoker
from stoker.core.compare import equal_bits
from stoker.core.errors import StokerWarning, UsageError
from stoker.core.random_state import RandomState
from stoker.sampling.generators import find_generators
from stoker.staging import source
from stoker.staging.executed_code import Executed, assigns_outside
from stoker.staging.split import Split
from stoker.staging.trial import find_plan

SHAPE = (3, 8, 8)


@pytest.fixture(autouse=True)
def worth_cutting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts are looked for inside calls however short they are; calls are kept only where there is no cut."""
    monkeypatch.setattr("stoker.staging.search.WORTH_S", 0.0)
    monkeypatch.setattr("stoker.staging.trial.MEMO_SHARE", float("inf"))


class Compose:
    """As everybody writes it."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, x: Any) -> Any:
        for t in self.transforms:
            x = t(x)
        return x


class Joint(Compose):
    """torchvision's references: image and target together."""

    def __call__(self, x: Any, y: Any) -> Any:  # type: ignore[override]
        for t in self.transforms:
            x, y = t(x, y)
        return x, y


class KeywordCompose(Compose):
    """albumentations' way to be called."""

    def __call__(self, **data: Any) -> Any:  # type: ignore[override]
        for t in self.transforms:
            data = t(**data)
        return data


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def halve(x: torch.Tensor) -> torch.Tensor:
    return x[:, ::2, ::2]


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(x.shape)


class Normalize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((3, 1, 1), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.mean


class Flip:
    """p, and where the numbers come from."""

    def __init__(self, p: float, draw: Callable[[], float]) -> None:
        self.p, self.draw = p, draw

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1) if self.draw() < self.p else x


class Own:
    """Owns its generator, as later albumentations do."""

    def __init__(self, p: float) -> None:
        self.p, self.rng = p, np.random.default_rng(3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1) if self.rng.random() < self.p else x


class Slotted:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.rng.random() > 0.01 else -x


class TorchOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand((), generator=self.generator) > 0.01 else -x


class Counter:
    """Every hundredth sample is another: no chance in it, and yet not the same twice."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return -x if self.calls % 100 == 0 else x


class Books(Counter):
    """The count begins in the class."""

    calls = 0

    def __init__(self) -> None:
        pass


class Shared:
    """MONAI's way: a generator in the class, and in the instance one of its own."""

    rng = np.random.RandomState(0)

    def seed(self, seed: int) -> Shared:
        self.rng = np.random.RandomState(seed)
        return self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.rng.rand() > 0.01 else -x


class Keyed:
    """Keeps its books by its own id, as albumentations does; there is no chance in that."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + len({id(self): 1})


class OthersId:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x if id(x) % 4096 else -x


class SetsUp:
    """Changes itself the first time only."""

    kernel: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernel is None:
            self.kernel = torch.full((3, 1, 1), 0.25)
        return x * self.kernel


class Sometimes:
    """Draws for some samples only, none of which may be among those that are tried."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(()) if float(x[0, 0, 0]) == 17.0 else x


_rng = np.random.RandomState(1)
_turns = itertools.cycle([1.0] * 99 + [-1.0])
_count = 0


def global_generator(x: torch.Tensor) -> torch.Tensor:
    return x if _rng.rand() > 0.01 else -x


def global_counter(x: torch.Tensor) -> torch.Tensor:
    global _count
    _count += 1
    return -x if _count % 100 == 0 else x


def closure(p: float) -> Callable[[torch.Tensor], torch.Tensor]:
    rng = random.Random(9)

    def transform(x: torch.Tensor) -> torch.Tensor:
        return x if rng.random() > p else -x

    return transform


def helper(x: torch.Tensor) -> torch.Tensor:
    return _deep(x)


def _deep(x: torch.Tensor) -> torch.Tensor:
    return x if secrets.randbelow(100) else -x


def imports_inside(x: torch.Tensor) -> torch.Tensor:
    import os as system

    return x if system.urandom(1)[0] > 2 else -x


def one_of(x: torch.Tensor) -> torch.Tensor:
    return random.choice([scale, torch.neg])(x)


# name, transforms, how many of them are kept
PIPELINES: list[tuple[str, Any, int]] = [
    ("one function", Compose([scale]), 1),
    ("nothing random", Compose([scale, halve, Normalize()]), 3),
    ("nn.Sequential", nn.Sequential(Normalize(), nn.ReLU(), nn.Dropout(0.01)), 2),
    ("dropout switched off", nn.Sequential(Normalize(), nn.Dropout(0.5).eval(), nn.ReLU()), 3),
    ("p = 0.01, Python's", Compose([scale, Flip(0.01, random.random)]), 1),
    ("p = 0.01, torch's", Compose([scale, Flip(0.01, lambda: float(torch.rand(())))]), 1),
    ("p = 0.01, NumPy's", Compose([scale, Flip(0.01, np.random.rand), halve]), 1),
    ("p = 0", Compose([scale, Flip(0.0, random.random)]), 1),
    ("a generator of its own, NumPy's", Compose([scale, Own(0.01)]), 1),
    ("a generator of its own, in a slot", Compose([scale, Slotted()]), 1),
    ("a generator of its own, torch's", Compose([Normalize(), TorchOwn()]), 1),
    ("a generator in a closure", Compose([scale, closure(0.01)]), 1),
    (
        "a generator in a partial",
        Compose([scale, functools.partial(lambda x, rng: x if rng.random() > 0.01 else -x, rng=random.Random(2))]),
        1,
    ),
    ("a global generator", Compose([scale, global_generator]), 1),
    ("a counter", Compose([scale, Counter()]), 1),
    ("a counter that begins in its class", Compose([scale, Books()]), 1),
    ("a generator in the class", Compose([scale, Shared()]), 1),
    ("one in the class, another in the instance", Compose([scale, Shared().seed(4)]), 1),
    ("id(self)", Compose([scale, Keyed(), noise]), 1),
    ("a global counter", Compose([scale, global_counter]), 1),
    ("an iterator", Compose([scale, lambda x: x * next(_turns)]), 0),
    ("choice", Compose([scale, one_of]), 1),
    ("sets itself up", Compose([SetsUp(), noise]), 1),
    ("nested", Compose([Compose([scale, nn.Sequential(Normalize(), nn.Dropout(0.1))]), halve]), 2),
    ("a lambda", Compose([lambda x: x + 1, lambda x: x + torch.rand(())]), 1),
    ("numpy in between", Compose([lambda x: x.numpy(), np.ascontiguousarray, torch.from_numpy, noise]), 3),
]
# what no seed brings back
ENTROPY: list[tuple[str, Any]] = [
    ("a generator made anew", lambda x: x if np.random.default_rng().random() > 0.01 else -x),
    ("another clock", lambda x: x if time.thread_time_ns() % 100 else -x),
    ("os.urandom", lambda x: x if os.urandom(1)[0] > 2 else -x),
    ("secrets, two calls down", helper),
    ("SystemRandom", Flip(0.01, random.SystemRandom().random)),
    ("imported inside", imports_inside),
    ("uuid", lambda x: x if uuid.uuid4().int % 100 else -x),
    ("the clock", lambda x: x if time.time_ns() % 100 else -x),
]


class Pictures(Dataset[Any]):
    """In the ecosystem's convention."""

    def __init__(self, transform: Any = None, target_transform: Any = None, n: int = 20) -> None:
        self.transform, self.target_transform, self.n = transform, target_transform, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        x, y = torch.full(SHAPE, float(i)), i % 3
        x += torch.arange(x.numel()).view(SHAPE) / 7
        if self.transform is not None:
            x = self.transform(x)
        if self.target_transform is not None:
            y = self.target_transform(y)
        return x, y


def seeded(data: Any) -> RandomState:
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    return RandomState(find_generators(data))


def kept(found: Split) -> list[str]:
    """Transforms that are kept as a whole."""
    containers = ("Compose", "Sequential", "Joint", "KeywordCompose")
    return [row.name for row in found.rows if row.cached and row.where in containers and row.why.startswith("the same")]


def same_bits(data: Any, epochs: int = 3, **settings: Any) -> stoker.Staged:
    """Samples of a staged dataset are those of the dataset, to the bit, and leave the same random states."""
    n = len(data)
    states = seeded(data)
    whole = [data[i] for _ in range(epochs) for i in range(n)]
    after = RandomState(find_generators(data)).in_order()
    states.restore()
    staged = stoker.Staged(data, cache_budget="10MB", **settings)
    states.restore()
    parts = [staged[i] for _ in range(epochs) for i in range(n)]
    assert equal_bits(whole, parts)
    assert RandomState(find_generators(data)).in_order() == after
    return staged


@pytest.mark.parametrize(("name", "transform", "n"), PIPELINES, ids=[p[0] for p in PIPELINES])
@pytest.mark.few(1)
def test_no_random_transform_is_ever_frozen(name: str, transform: Any, n: int) -> None:
    found = stoker.split(Pictures(transform))
    whole = found.exact
    assert whole == (name in ("one function", "nothing random", "dropout switched off")), str(found)
    assert whole or len(kept(found)) == n, str(found)
    assert all(row.why for row in found.rows)
    flags = [row.cached for row in found.rows]
    assert flags == sorted(flags, reverse=True)  # nothing behind a random one is kept


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "transform"), ENTROPY, ids=[p[0] for p in ENTROPY])
def test_what_no_seed_brings_back_is_never_frozen(name: str, transform: Any) -> None:
    try:
        found = stoker.split(Pictures(Compose([scale, transform])))
        memo, why = found.memo, found.why_not
        assert not found.exact
        assert len(kept(found)) <= 1, str(found)
    except UsageError as e:
        memo, why = None, str(e)
    # Which of the checks meets it first is chance, where chance decides what comes out.
    assert memo is not None or any(reason in why for reason in ("asks", "repeat", "in two parts", "differs")), why


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        "p = 0.01, torch's",
        "nothing random",
        "a generator in a closure",
        "nested",
        "one in the class, another in the instance",
        "nn.Sequential",
        "id(self)",
    ],
)
def test_two_parts_are_the_whole_to_the_bit(name: str) -> None:
    transform = next(t for n, t, _ in PIPELINES if n == name)
    staged = same_bits(Pictures(transform, target_transform=lambda y: y + 1))
    assert staged.account.filled >= 20


def test_random_states_are_left_as_they_were() -> None:
    own = Own(0.5)
    data = Pictures(Compose([scale, own, noise]))
    states = RandomState(find_generators(data))
    stoker.split(data)
    assert not states.moved()


class DrawsSometimes(Pictures):
    """Draws before the cut, for samples that no trial has seen."""

    def __init__(self, some: set[int], n: int = 40) -> None:
        super().__init__(n=n)
        self.some = some

    def __getitem__(self, i: int) -> Any:
        x = torch.full(SHAPE, float(i))
        if i in self.some:
            x = x + torch.rand(())
        x = x.exp().log()
        return x + torch.rand(())


@pytest.mark.slow
def test_samples_that_draw_before_the_cut_are_made_as_a_whole() -> None:
    staged = same_bits(DrawsSometimes({17}))
    assert staged.account.filled == 39


class Scaled(Pictures):
    """Reads an attribute through a property, in a branch that no trial takes."""

    scale = 2.0

    @property
    def factor(self) -> float:
        return self.scale

    def __getitem__(self, i: int) -> Any:
        return i * self.factor if i > 99 else i


def test_what_a_property_reads_is_known_though_it_did_not_run() -> None:
    data = Scaled()
    code = Executed(data)
    assert code.run(lambda: data[1]) == 1
    assert "scale" in code.user_names


@pytest.mark.slow
@pytest.mark.filterwarnings("error::stoker.StokerWarning")
def test_samples_without_a_first_part_are_few_in_later_epochs_too() -> None:
    """What a worker made anew has to make itself is, from the second epoch on, nothing but such samples."""
    staged = stoker.Staged(DrawsSometimes(set(range(5, 200, 11)), n=200), cache_budget="20MB")
    loader = stoker.DataLoader(staged, 8, num_workers=2)
    for _ in range(3):
        assert len(list(loader)) == 25
    assert staged.account.filled == 182


@pytest.mark.slow
def test_a_dataset_most_of_whose_samples_draw_before_the_cut_is_let_go() -> None:
    with pytest.warns(stoker.StokerWarning, match=r"Cache discarded: \d+ of \d+ samples draw"):
        same_bits(DrawsSometimes(set(range(40)) - {0, 39, 20}))


def test_a_transform_that_draws_for_some_samples_only_is_found_while_filling() -> None:
    sometimes = Sometimes()
    staged = stoker.Staged(Pictures(n=40), prepare=lambda s: (sometimes(s[0]), s[1]), cache_budget="10MB")
    data = Pictures(sometimes, n=40)
    states = seeded(data)
    plain = [data[i] for _ in range(2) for i in range(40)]
    states.restore()
    assert equal_bits(plain, [staged[i] for _ in range(2) for i in range(40)])


class JointPictures(Pictures):
    def __init__(self, transforms: Any) -> None:
        super().__init__()
        self.transforms = transforms

    def __getitem__(self, i: int) -> Any:
        x, y = self.transforms(*super().__getitem__(i))
        return {"image": x, "boxes": y, "index": i}


class KeywordPictures(JointPictures):
    """albumentations: by keyword, and the result is indexed."""

    def __getitem__(self, i: int) -> Any:
        x, y = Pictures.__getitem__(self, i)
        out = self.transforms(image=x, mask=y)
        return out["image"], out["mask"]


class TwoViews(Pictures):
    """SimCLR: the same transform twice."""

    def __getitem__(self, i: int) -> Any:
        x = torch.full(SHAPE, float(i))
        return [self.transform(x), self.transform(x)], i


class Under(Pictures):
    """The container is under a name of its own, in a helper."""

    def __init__(self, tf: Any) -> None:
        super().__init__()
        self.augmentations = tf

    def load(self, i: int, *, scale: float = 1.0) -> torch.Tensor:
        return torch.full(SHAPE, float(i)).exp() * scale

    def make(self, *args: Any, **kwargs: Any) -> Any:
        x = self.load(*args, **kwargs)
        return self.augmentations(x)

    def __getitem__(self, i: int) -> Any:
        return self.make(i, scale=0.5), i


JOINT = Joint([lambda x, y: (x * 2, y + 1), lambda x, y: (x + torch.rand(()), y)])
KEYWORD = KeywordCompose(
    [
        lambda image, mask: {"image": image * 2, "mask": mask},
        lambda image, mask: {"image": noise(image), "mask": mask},
    ]
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "n"),
    [
        (JointPictures(JOINT), 1),
        (KeywordPictures(KEYWORD), 1),
        (TwoViews(Compose([scale, noise])), 1),
        (Under(Compose([scale, noise])), 1),
        (Subset(Pictures(Compose([scale, noise])), [3, 5, 7, 9]), 1),
        (ConcatDataset([Pictures(Compose([scale, noise])), Pictures(Compose([scale, noise]))]), 1),
        (ConcatDataset([Pictures(Compose([scale, noise])), Pictures(Compose([noise]))]), None),
    ],
    ids=["image and target", "by keyword", "two views", "in a helper", "Subset", "ConcatDataset", "of two kinds"],
)
@pytest.mark.few(1)
def test_conventions(data: Any, n: int | None) -> None:
    found = stoker.split(data)
    assert n is None or len(kept(found)) == n, str(found)
    staged = same_bits(data)
    assert n is None or staged.account.filled == len(data)


class Stateful(Pictures):
    """What a sample leaves behind is read by the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __getitem__(self, i: int) -> Any:
        x = torch.full(SHAPE, float(i)).exp().log()
        self.count += 1
        return x * self.count


def test_what_a_sample_changes_is_changed_each_time() -> None:
    data = Stateful()
    with pytest.raises(UsageError, match=r"depend on dataset\.count was \d and is \d"):
        stoker.split(data)
    assert data.count == 0  # the trial ran elsewhere


class TakesOption(Pictures):
    """Its first sample makes a reader of an option, which it takes out of the options, as in BasicSR's datasets."""

    reader: Any = None
    options: dict[str, str]

    def __getitem__(self, i: int) -> Any:
        if self.reader is None:
            self.reader = Gain() if self.options.pop("kind") else None
        return self.reader(torch.full(SHAPE, float(i))).exp().log() + torch.rand(())


@pytest.mark.slow
def test_what_the_first_sample_changes_ends_no_cache() -> None:
    data = TakesOption()
    data.options = {"kind": "gain"}
    staged = stoker.Staged(data, cache_budget="10MB")
    for _ in range(2):
        list(torch.utils.data.DataLoader(staged, batch_size=4, num_workers=2))
        assert staged.account.filled == 20
    assert staged.account.prepared == 20


class Settings:
    keeps = False


class KeepsOnRequest(Pictures):
    """Keeps images in a dict of its own, which two settings switch off."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.keeps, self.images = keeps, {}  # type: ignore[var-annotated]

    def load(self, i: int) -> Any:
        if Settings.keeps and i in self.images:
            return self.images[i]
        x = torch.full(SHAPE, float(i)).exp().log()
        if Settings.keeps:
            self.images[i] = x
        return x

    def __getitem__(self, i: int) -> Any:
        x = self.load(i)
        if self.keeps:
            self.last = x
        return x + torch.rand(())


@pytest.mark.slow
def test_what_a_setting_switches_off_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = KeepsOnRequest()
    staged = same_bits(data)
    assert staged.account.filled == 20
    monkeypatch.setattr(Settings, "keeps", True)
    with pytest.warns(StokerWarning, match="discarded"):
        staged._begin()
    assert len([staged[i] for i in range(20)]) == len(data.images) == 20
    assert staged.account.filled == 0  # the dataset's own cache serves the script's process


class Switched(KeepsOnRequest):
    """Not a setting: a method changes it."""

    def __getitem__(self, i: int) -> Any:
        if self.keeps:
            self.last = torch.full(SHAPE, float(i))
        return torch.full(SHAPE, float(i)).exp().log() + torch.rand(())

    def switch(self) -> None:
        self.keeps = not self.keeps


def test_what_a_method_switches_is_no_setting() -> None:
    with pytest.raises(UsageError, match="last"):
        stoker.split(Switched())


class Row:
    """As a row of a table: it refers to an object of its own twice."""

    def __init__(self, i: int) -> None:
        self.values = {"i": i}
        self.cached = [self.values]


class Table(Pictures):
    def __getitem__(self, i: int) -> Any:
        row = Row(i)
        x = torch.full(SHAPE, float(i)).exp().log()
        x = x + torch.rand(())
        return x, row.values["i"], row.values is row.cached[0]


@pytest.mark.slow
def test_an_object_may_refer_to_another_one_twice() -> None:
    assert same_bits(Table()).account.filled == 20


@functools.lru_cache(maxsize=2)
def volume(k: int) -> torch.Tensor:
    time.sleep(0.002)
    return torch.full((4, *SHAPE), float(k))


class Slices(Pictures):
    def __getitem__(self, i: int) -> Any:
        x = volume(i // 4)[i % 4] * 2
        return x + torch.rand(())


@pytest.mark.slow
def test_what_a_small_cache_of_functools_holds_is_no_measure() -> None:
    plan = stoker.split(Slices()).plan
    assert plan is not None
    assert plan.head_s > 0.002
    same_bits(Slices())


class Methods(Pictures):
    """Its transforms are methods of its own, and others of its methods have nothing to do with a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = Compose([self.double, self.shake])

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def shake(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(())

    def download(self) -> bytes:
        return os.urandom(int(time.time()))


class ByEpoch(Pictures):
    """Draws from a generator that is made of the epoch and the index."""

    epoch = 0

    def __getitem__(self, i: int) -> Any:
        x = torch.full(SHAPE, float(i)).exp().log()
        rng = np.random.default_rng((self.epoch, i))
        return x + rng.random()


@pytest.mark.slow
def test_what_the_script_changes_in_each_epoch_is_left_to_the_second_part() -> None:
    data = ByEpoch()
    staged = stoker.Staged(data, cache_budget="1MB")
    loader = stoker.DataLoader(staged, 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for data.epoch in range(5):
            staged._begin()  # as --apply does where it has batches made in the script's process
            assert equal_bits(torch.cat(list(loader)), torch.stack([data[i] for i in range(len(data))]))
    ours = [
        str(w.message) for w in said if issubclass(w.category, stoker.StokerWarning)
    ]  # Python 3.12's are about fork
    assert ["epoch" in message for message in ours] == [True, True]
    assert staged.account.filled == len(data)
    assert not staged.is_exact


def recursive(x: torch.Tensor, depth: int = 2) -> torch.Tensor:
    x = (x.exp() + recursive.shift).log()
    return recursive(x, depth - 1) if depth else x + torch.rand(())


recursive.shift = 1.0  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_function_that_names_itself_is_cut() -> None:
    same_bits(Pictures(recursive))
    assert any(row.name == "recursive" and row.cached for row in stoker.split(Pictures(recursive)).rows)


class Config:
    gain = 1.0
    unused = 0


class Loops(Pictures):
    """Without a class for its transforms."""

    def __init__(self, *steps: Any) -> None:
        super().__init__()
        self.steps = list(steps)

    def __getitem__(self, i: int) -> Any:
        x = torch.full(SHAPE, float(i))
        if self.n:
            for step in self.steps:
                x = step(x)
        return x, i


class LoopsInPairs(Loops):
    def __getitem__(self, i: int) -> Any:
        x, y = torch.full(SHAPE, float(i)), torch.arange(4.0)
        for step in self.steps:
            x, y = step(x, y)
        return {"x": x, "y": y}


@pytest.mark.slow
def test_a_loop_over_transforms_is_cut_between_them() -> None:
    found = same_bits(Loops(scale, scale, noise, scale)).split
    assert found is not None
    assert [row.name for row in found.rows if row.where == "Loop" and row.cached] == ["scale", "scale"]
    found = same_bits(LoopsInPairs(lambda x, y: (scale(x), y + 1), lambda x, y: (x, noise(y)))).split
    assert found is not None
    assert sum(row.where == "Loop" and row.cached for row in found.rows) == 1


class InPairs(Pictures):
    """Detection's way: the target's dictionary is passed on, and written to."""

    def __getitem__(self, i: int) -> Any:
        x, target = torch.full(SHAPE, float(i)), {"boxes": torch.arange(4.0)}
        if self.transform is not None:
            x, target = self.transform(x, target)
        return x, target


def halve_pair(x: torch.Tensor, target: dict[str, torch.Tensor]) -> Any:
    target["boxes"] = target["boxes"] / 2
    return halve(x), target


@pytest.mark.slow
def test_variables_that_the_second_part_assigns_together_are_not_kept() -> None:
    transform = Joint([halve_pair, lambda x, target: (noise(x), target)])
    found = same_bits(InPairs(transform)).split
    assert found is not None
    assert found.plan is not None
    assert kept(found) == ["halve_pair"]
    small = halve(torch.empty(SHAPE)).numel() + 4
    assert found.plan.nbytes < 4 * small + 64


class Boxes(Pictures):
    """The samples of the trial have one box each."""

    def __getitem__(self, i: int) -> Any:
        x = [scale(y) for y in [torch.full(SHAPE, float(i))]]
        boxes = [2.0] * (3 if i == 5 else 1)
        shift = random.random()
        shifted = [box + shift for box in boxes]
        return x, shifted


def test_lists_of_the_second_part_may_have_any_length() -> None:
    same_bits(Boxes())


class Remembers(Pictures):
    """Keeps its samples in a list of its own, which copies in workers would not fill."""

    def __init__(self, n: int) -> None:
        super().__init__(n=n)
        self.known: list[Any] = [None] * n

    def __getitem__(self, i: int) -> Any:
        if self.known[i] is None:
            self.known[i] = torch.full(SHAPE, float(i))
        return self.known[i] + torch.rand(())


class FillsAsItLikes(Remembers):
    """What it keeps is no cache, for samples depend on it."""

    def __getitem__(self, i: int) -> Any:
        x = super().__getitem__(i)
        return x + sum(known is not None for known in self.known)


def test_a_list_that_samples_fill_is_a_change_of_the_dataset() -> None:
    assert find_plan(FillsAsItLikes(20)).changes == "known"
    assert find_plan(FillsAsItLikes(500)).changes == "known"
    assert find_plan(Pictures(noise)).changes == ""


def test_a_list_of_samples_is_a_cache_of_the_datasets_own() -> None:
    for n in (20, 500):
        found = find_plan(Remembers(n))
        assert found.changes == ""
        assert found.plan is not None
        assert found.plan.own_caches == [("known",)]


class WithoutGradients(Pictures):
    """The context is part of what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(8, requires_grad=True)

    def __getitem__(self, i: int) -> Any:
        with torch.no_grad(), contextlib.suppress(ZeroDivisionError):
            x = torch.full(SHAPE, float(i)) * self.weight
            i // (i - 4)  # fails for one sample
            x = (x * self.weight + torch.rand(())) * self.weight
        return x * torch.rand(())


class WithDigits(Pictures):
    """What is set inside a context is undone at its end."""

    def __getitem__(self, i: int) -> Any:
        with decimal.localcontext() as context:
            x = decimal.Decimal(i) / 7
            context.prec = 3
            x = x / 7
            return x / 7 + decimal.Decimal(random.random())


class WithFilters(Pictures):
    def __getitem__(self, i: int) -> Any:
        with warnings.catch_warnings():
            x = torch.full(SHAPE, float(i))
            warnings.simplefilter("ignore")
            x = scale(x)
            warnings.warn("seen by nobody", stacklevel=1)
            return noise(x)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("cls", "line"),
    [(WithoutGradients, "torch.rand(())"), (WithDigits, "context.prec"), (WithFilters, "warnings.simplefilter")],
)
def test_both_parts_enter_a_context(cls: type[Pictures], line: str) -> None:
    found = same_bits(cls()).split
    assert found is not None
    assert [line in row.name for row in found.rows] == [False, True]


class Louder:
    gain = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * torch.rand(())


class LooksUp(Pictures):
    """The second part gets an object of the dataset's from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = {"train": Louder()}

    def __getitem__(self, i: int) -> Any:
        x = torch.full(SHAPE, float(i))
        gain = self.gains.get("train")
        return gain(x)  # type: ignore[misc]


class PassesItself(Pictures):
    gain = 1.0

    def __getitem__(self, i: int) -> Any:
        x = torch.full(SHAPE, float(i))
        owner = [self][0]
        return x + owner.gain * torch.rand(())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LooksUp, PassesItself])
def test_what_the_second_part_reads_of_the_dataset_is_the_datasets_own(kind: type[Pictures]) -> None:
    data = kind()
    staged = same_bits(data, 2)
    gain: Any = data.gains["train"] if isinstance(data, LooksUp) else data
    gain.gain = 100.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StokerWarning)
        staged._begin()
        seeded(data)
        parts = [staged[i] for i in range(len(data))]
    seeded(data)
    assert equal_bits(parts, [data[i] for i in range(len(data))])


class OfItsIndex(Pictures):
    """The sample's own generator, which makes the same each time; NumPy asks the system for entropy in between."""

    def __getitem__(self, i: int) -> Any:
        rng = np.random.RandomState(
            i + 3,
        )
        x = torch.from_numpy(rng.rand(4))
        return x + torch.rand(())


class OfEntropy(Pictures):
    def __getitem__(self, i: int) -> Any:
        x = torch.from_numpy(np.random.RandomState().rand(4))
        return x + torch.rand(())


@pytest.mark.slow
def test_a_generator_that_is_seeded_for_the_sample_asks_nothing() -> None:
    if sys.version_info >= (3, 11):  # whose code objects know columns
        same_bits(OfItsIndex())
    with pytest.raises(UsageError, match=r"before anything else|os.urandom|different result"):
        stoker.split(OfEntropy())


class CountsErrors(Pictures):
    """timm's: how many samples in a row could not be loaded."""

    errors = failed = 0

    def __getitem__(self, i: int) -> Any:
        try:
            if i == 3:
                raise OSError
            x = torch.full(SHAPE, float(i))
        except OSError:
            self.errors += 1
            self.failed += 1
            return self.__getitem__((i + 1) % self.n)
        self.errors = 0
        x = x + torch.arange(x.numel()).view(SHAPE) / 7
        if self.transform is not None:
            x = self.transform(x)
        return x, i


@pytest.mark.slow
@pytest.mark.parametrize("transform", [Compose([scale, noise]), scale], ids=["random", "deterministic"])
def test_what_an_except_block_counts_is_counted_as_without_a_cache(transform: Any) -> None:
    data, plain = CountsErrors(transform), CountsErrors(transform)
    staged = stoker.Staged(data, cache_budget="10MB")
    assert staged.split is not None
    assert staged.split.plan is not None, staged.split
    assert not any("self.errors" in row.name for row in staged.split.rows), staged.split
    for _ in range(4):
        states = seeded(plain)
        whole = [plain[i] for i in range(plain.n)]
        states.restore()
        assert equal_bits(whole, [staged[i] for i in range(plain.n)])
        assert (data.errors, data.failed) == (plain.errors, plain.failed)
    assert staged.account.filled == plain.n - 1


def traced(x: dict[str, Any]) -> dict[str, Any]:
    """MONAI's RandRotate90d: it writes down the address of a transform that it makes for this call."""
    turns = random.randrange(4)
    record = {"class": "Rotate90", "id": id(object()), "do_transforms": True, "extra_info": {"k": turns}}
    return {"image": x["image"].rot90(turns, (1, 2)), "operations": [*x["operations"], record]}


def test_an_address_in_a_record_of_transforms_is_no_difference() -> None:
    started = lambda x: {"image": x, "operations": []}  # noqa: E731
    found = stoker.split(Pictures(Compose([scale, started, traced])))
    assert kept(found)[:1] == ["scale"]
    record = {"class": "Rotate90", "id": 1, "do_transforms": True, "extra_info": {"k": 1}}
    assert equal_bits(record, record | {"id": 2})
    assert not equal_bits(record, record | {"extra_info": {"k": 2}})
    assert not equal_bits({"class": 1, "id": 1}, {"class": 1, "id": 2})  # a sample of the user's


class Storage:
    """PyG's: it knows the object that holds it."""

    def __init__(self, parent: Any, x: torch.Tensor) -> None:
        self.parent, self.x = weakref.ref(parent), x


class Graph:
    def __init__(self, x: torch.Tensor) -> None:
        self.store = Storage(self, x)


def test_objects_that_know_their_parents_are_compared_by_content() -> None:
    assert equal_bits(Graph(torch.ones(2)), Graph(torch.ones(2)))
    assert not equal_bits(Graph(torch.ones(2)), Graph(torch.zeros(2)))


class Options(dict[str, Any]):
    """A configuration with attribute access as people write it: no AttributeError."""

    __getattr__ = dict.__getitem__


OPTIONS = Options(gain=2.0)


def test_a_configuration_whose_attributes_are_items() -> None:
    class Configured(Pictures):
        options = OPTIONS

        def __getitem__(self, i: int) -> Any:
            x = torch.full((3, 8, 8), float(i)) * OPTIONS.gain + self.options.gain
            return x + torch.rand(())

    same_bits(Configured(None))


class Gain:
    """Is called, and holds a value."""

    gain = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


GAIN = Gain()


def amplified(x: torch.Tensor) -> torch.Tensor:
    return GAIN(x) * Config.gain * amplified.gain


amplified.gain = 1.0  # type: ignore[attr-defined]


@pytest.mark.few(1)
@pytest.mark.parametrize("holder", [Config, GAIN, amplified], ids=["a class", "an object that is called", "a function"])
def test_a_value_that_a_global_variable_holds_begins_a_new_cache(holder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Pictures(amplified)
    staged = stoker.Staged(data, cache_budget="1MB")
    loader = stoker.DataLoader(staged, 4)
    plain = torch.cat([x for x, _ in loader])
    monkeypatch.setattr(Config, "unused", 1)
    assert equal_bits(torch.cat([x for x, _ in loader]), plain)
    monkeypatch.setattr(holder, "gain", 2.0)
    with pytest.warns(stoker.StokerWarning, match=r"gain('\])? was 1.0 and is 2.0"):
        assert equal_bits(torch.cat([x for x, _ in loader]), plain * 2)


transform = 3  # as a script's loop variable may have the name of an attribute


def test_a_global_variable_with_the_name_of_an_attribute_is_not_read() -> None:
    plan = stoker.split(Pictures(Compose([scale, noise]))).plan
    assert plan is not None
    assert not any(name == "transform" for _, name in plan.globals)


def test_only_what_a_sample_goes_through_is_looked_at() -> None:
    assert kept(stoker.split(Methods())) == ["double"]


class DrawsFirst(Pictures):
    def __getitem__(self, i: int) -> Any:
        return torch.rand(SHAPE) + i


class Memory(Pictures):
    """Keeps what its transform returned."""

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.kept: dict[int, Any] = {}

    def __getitem__(self, i: int) -> Any:
        if i not in self.kept:
            self.kept[i] = self.transform(torch.full(SHAPE, float(i)))
        return self.kept[i]


class Fails(Pictures):
    def __getitem__(self, i: int) -> Any:
        raise OSError(f"no file for {i}")


class SavesNatively(Pictures):
    """Saves what it computed, as VITS does: torch.save opens files in native code."""

    folder = ""

    def __getitem__(self, i: int) -> Any:
        torch.save(torch.zeros(1), f"{self.folder}/{i}.pt")
        return super().__getitem__(i)


@pytest.mark.skipif(os.uname().release < "6", reason="Landlock refuses what native code opens")
def test_files_that_native_code_writes_are_named_as_the_reason(tmp_path: Path) -> None:
    data = SavesNatively()
    data.folder = str(tmp_path)
    with pytest.raises(UsageError, match=r"must not write files, RuntimeError: .*Permission denied"):
        stoker.split(data)
    assert not list(tmp_path.iterdir())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DrawsFirst(), "DrawsFirst.__getitem__ draws random numbers before anything else"),
        (Memory(Compose([scale, noise])), r"cannot be split: .* changes self.kept\[i\]"),
        (Fails(), "its samples cannot be loaded: OSError: no file for"),
        (Stream(), "map-style"),
        (Pictures(n=0), "empty"),
        (7, "map-style"),
    ],
    ids=["draws first", "keeps it", "fails", "iterable", "empty", "no dataset"],
)
def test_what_cannot_be_split_says_why_and_what_to_do(data: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as e:
        stoker.split(data)
    if "cannot be split" in str(e.value):
        assert "stoker.Staged(dataset, prepare=" in str(e.value)


def test_a_dataset_that_proves_deterministic_is_kept_whole() -> None:
    found = stoker.split(Pictures())
    assert found.exact
    rows, cost = str(found).splitlines()
    assert rows == "kept  Pictures.__getitem__  the whole sample  the same each time"
    assert re.fullmatch(r"about \S+ MB for 20 samples; \S+ ms per sample, \S+ ms once cached", cost)


class Looks(Pictures):
    """Works on what its transform returned."""

    def __getitem__(self, i: int) -> Any:
        x = self.transform(torch.full(SHAPE, float(i)))
        return x, x.mean()


@pytest.mark.slow
def test_code_behind_the_transform_runs_each_time() -> None:
    same_bits(Looks(Compose([scale, noise])))


def test_the_report_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(os.path.dirname(__file__))
    found = stoker.split(Pictures(Compose([scale, noise, halve])))
    line = next(k for k, text in enumerate(open(__file__), 1) if text.strip() == "x = self.transform(x)")
    assert [" ".join(text.split()) for text in str(found).splitlines()[:-1]] == [
        f"kept test_split.py:{Pictures.__getitem__.__code__.co_firstlineno} {GETITEM} the same each time up to line {line}",
        f"kept test_split.py:{line} x = self.transform(x) in part, see below",
        "kept Compose scale the same each time",
        "each time Compose noise draws random numbers or changes something",
        "each time Compose halve comes after a random stage",
    ]
    assert found.plan is not None
    assert found.plan.shown == f"test_split.py:{line}"


GETITEM = getattr(Pictures.__getitem__.__code__, "co_qualname", "__getitem__")  # from Python 3.11 on


def test_a_constructor_that_draws_is_no_call_that_draws() -> None:
    class Fixed:
        def __init__(self) -> None:
            self.at = float(np.random.default_rng(1).random())

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.at

    assert len(kept(stoker.split(Pictures(Compose([Fixed(), noise]))))) == 1


def test_a_librarys_file_is_not_parsed_where_the_whole_sample_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.staging.source._parsed", lambda *_: pytest.fail("a file was parsed"))
    data = Subset(TensorDataset(torch.arange(40.0)), range(40))
    assert [row.name for row in find_plan(data).rows] == ["the whole sample"]


def test_what_a_functionassigns_outside_to_is_seen_without_its_source() -> None:
    total = 0

    def attribute(x: Any) -> None:
        x.count += 1

    def item(x: Any) -> None:
        x[0] = 1

    def slice_(x: Any) -> None:
        x[1:2] = [1]

    def deleted(x: Any) -> None:
        del x[0]

    def within(x: Any) -> None:
        def inner() -> None:
            x.count = 1

        inner()

    def outer_variable(x: Any) -> None:
        nonlocal total
        total = x

    def own_variables(x: Any) -> Any:
        y = [x.count for _ in x]
        return y[0] + x[1:2] + total

    functions = [attribute, item, slice_, deleted, within, outer_variable, own_variables]
    assert [fn.__name__ for fn in functions if not assigns_outside(fn.__code__)] == ["own_variables"]


def test_workers_find_the_source_of_what_they_rewrite_parsed() -> None:
    class Kept(Pictures):
        def load(self, i: int) -> torch.Tensor:
            return torch.full(SHAPE, float(i)).cos().sin().exp()

        def __getitem__(self, i: int) -> Any:
            return self.load(i) + torch.rand(SHAPE)

    source._parsed.cache_clear()
    source._tree_of.cache_clear()
    stoker.split(Kept())
    assert source._parsed.cache_info().currsize == 1


class AtAnAddress(Dataset[Any]):
    """The addresses of new objects decide."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        return np.arange(5000.0) ** 0.5 * (hash(object()) // 64 % 5)


def test_what_depends_on_addresses_is_not_cached() -> None:
    with pytest.raises(UsageError, match="cannot be split"):
        stoker.Staged(AtAnAddress())
