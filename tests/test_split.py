"""The border between what is deterministic and what is random: found, reported, and never on the wrong side."""

from __future__ import annotations

import functools
import itertools
import os
import random
import secrets
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

import stoker
from stoker.errors import UsageError
from stoker.staging.border import Split

SHAPE = (3, 8, 8)


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


# name, transforms, how many of them may be kept
PIPELINES: list[tuple[str, Any, int]] = [
    ("nothing random", [scale, halve, Normalize()], 3),
    ("one function", scale, 1),
    ("one random function", noise, 0),
    ("a list", [scale, noise, halve], 1),
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
    ("a generator made anew", Compose([scale, lambda x: x if np.random.default_rng().random() > 0.01 else -x]), 1),
    ("id(self)", Compose([scale, Keyed(), noise]), 2),
    ("id of another", Compose([scale, OthersId()]), 1),
    ("another clock", Compose([scale, lambda x: x if time.thread_time_ns() % 100 else -x]), 1),
    ("a global counter", Compose([scale, global_counter]), 1),
    ("an iterator", Compose([scale, lambda x: x * next(_turns)]), 1),
    ("os.urandom", Compose([scale, lambda x: x if os.urandom(1)[0] > 2 else -x]), 1),
    ("secrets, two calls down", Compose([scale, helper]), 1),
    ("SystemRandom", Compose([scale, Flip(0.01, random.SystemRandom().random)]), 1),
    ("imported inside", Compose([scale, imports_inside]), 1),
    ("uuid", Compose([scale, lambda x: x if uuid.uuid4().int % 100 else -x]), 1),
    ("the clock", Compose([scale, lambda x: x if time.time_ns() % 100 else -x]), 1),
    ("choice", Compose([scale, one_of]), 1),
    ("sets itself up", Compose([SetsUp(), noise]), 1),
    ("nested", Compose([Compose([scale, nn.Sequential(Normalize(), nn.Dropout(0.1))]), halve]), 2),
    ("first is random", Compose([noise, scale]), 0),
    ("a lambda", Compose([lambda x: x + 1, lambda x: x + torch.rand(())]), 1),
    ("numpy in between", Compose([lambda x: x.numpy(), np.ascontiguousarray, torch.from_numpy, noise]), 3),
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
        if isinstance(self.transform, list):
            for t in self.transform:
                x = t(x)
        elif self.transform is not None:
            x = self.transform(x)
        if self.target_transform is not None:
            y = self.target_transform(y)
        return x, y


def bits(x: Any) -> Any:
    return x.numpy().tobytes() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize(("name", "transform", "kept"), PIPELINES, ids=[p[0] for p in PIPELINES])
def test_no_random_transform_is_ever_frozen(name: str, transform: Any, kept: int) -> None:
    found = stoker.split(Pictures(transform))
    mine = [row for row in found.rows if row.where.startswith("transform")]
    assert sum(row.cached for row in mine) == kept, str(found)
    assert all(row.why for row in mine)
    flags = [row.cached for row in mine]
    assert flags == sorted(flags, reverse=True)  # nothing behind a random one is kept


@pytest.mark.parametrize(
    "name", ["a list", "p = 0.01, torch's", "nested", "choice", "a generator in a closure", "nothing random"]
)
def test_two_parts_are_the_whole_to_the_bit(name: str) -> None:
    transform = next(t for n, t, _ in PIPELINES if n == name)
    data = Pictures(transform, target_transform=lambda y: y + 1)
    staged = stoker.Staged(data, cache_budget="10MB")
    state = stoker.staging.chance.States(list(stoker.staging.reach.reach(transform).generators.values()))
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    state = stoker.staging.chance.States(list(stoker.staging.reach.reach(transform).generators.values()))
    whole = [tuple(map(bits, data[i])) for _ in range(3) for i in range(20)]
    state.restore()
    parts = [tuple(map(bits, staged[i])) for _ in range(3) for i in range(20)]
    assert whole == parts
    assert staged.account.filled == 20


def test_random_states_are_left_as_they_were() -> None:
    own = Own(0.5)
    states = stoker.staging.chance.States([own.rng])
    stoker.split(Pictures(Compose([scale, own, noise])))
    assert not states.moved()


def test_a_transform_that_draws_for_some_samples_only_is_found_while_filling() -> None:
    sometimes = Sometimes()
    data = Pictures([sometimes], n=40)
    staged = stoker.Staged(Pictures(n=40), prepare=lambda s: (sometimes(s[0]), s[1]), cache_budget="10MB")
    torch.manual_seed(0)
    plain = [tuple(map(bits, data[i])) for _ in range(2) for i in range(40)]
    torch.manual_seed(0)
    with pytest.warns(stoker.StokerWarning, match="draws from torch's random generator"):
        mine = [tuple(map(bits, staged[i])) for _ in range(2) for i in range(40)]
    assert plain == mine
    assert "draws" in staged.account.reason


class JointPictures(Pictures):
    def __init__(self, transforms: Any) -> None:
        super().__init__()
        self.transforms = transforms

    def __getitem__(self, i: int) -> Any:
        x, y = self.transforms(*super().__getitem__(i))
        return {"image": x, "boxes": y, "index": i}


class KeywordPictures(JointPictures):
    def __getitem__(self, i: int) -> Any:
        x, y = Pictures.__getitem__(self, i)
        out = self.transforms(image=x, mask=y)
        return out["image"], out["mask"]


class TwoViews(Pictures):
    """SimCLR: the same transform twice."""

    def __getitem__(self, i: int) -> Any:
        x = torch.full(SHAPE, float(i))
        return [self.transform(x), self.transform(x)], i


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (JointPictures(Joint([lambda x, y: (x * 2, y + 1), lambda x, y: (x + torch.rand(()), y)])), 1),
        (
            KeywordPictures(
                KeywordCompose(
                    [
                        lambda image, mask: {"image": image * 2, "mask": mask},
                        lambda image, mask: {"image": noise(image), "mask": mask},
                    ]
                )
            ),
            1,
        ),
        (TwoViews(Compose([scale, noise])), 1),
        (Subset(Pictures(Compose([scale, noise])), [3, 5, 7, 9]), 1),
        (ConcatDataset([Pictures(Compose([scale, noise])), Pictures(Compose([noise]))]), 1),
    ],
    ids=["image and target", "by keyword", "two views", "Subset", "ConcatDataset"],
)
def test_conventions(data: Any, kept: int) -> None:
    found = stoker.split(data)
    assert sum(row.cached for row in found.rows) == kept + 1, str(found)
    n = len(data)
    torch.manual_seed(5)
    whole = [stoker.cache.leaves.take(data[i]) for _ in range(2) for i in range(n)]
    staged = stoker.Staged(data, cache_budget="10MB")
    torch.manual_seed(5)
    parts = [stoker.cache.leaves.take(staged[i]) for _ in range(2) for i in range(n)]
    assert [w[0] for w in whole] == [p[0] for p in parts]
    assert all(
        a.tobytes() == b.tobytes() for w, p in zip(whole, parts, strict=True) for a, b in zip(w[1], p[1], strict=True)
    )
    assert staged.account.filled == n


class Methods(Pictures):
    """Its transforms are methods of its own, and others of its methods have nothing to do with a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = [self.double, self.shake]

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def shake(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(())

    def download(self) -> bytes:
        return os.urandom(int(time.time()))


def test_only_what_a_sample_goes_through_is_looked_at() -> None:
    found = stoker.split(Methods())
    assert [row.cached for row in found.rows] == [True, True, False], str(found)


class Opaque(Pictures):
    def __getitem__(self, i: int) -> Any:
        return torch.full(SHAPE, float(i)) + torch.rand(())


class Looks(Pictures):
    """Works on what its transform returned."""

    def __getitem__(self, i: int) -> Any:
        x = self.transform(torch.full(SHAPE, float(i)))
        return x, x.mean()


class Asks(Pictures):
    def __getitem__(self, i: int) -> Any:
        x = self.transform(torch.full(SHAPE, float(i)))
        return x if isinstance(x, torch.Tensor) else torch.as_tensor(x)


class Memory(Pictures):
    """Keeps what its transform returned."""

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.kept: dict[int, Any] = {}

    def __getitem__(self, i: int) -> Any:
        if i not in self.kept:
            self.kept[i] = self.transform(torch.full(SHAPE, float(i)))
        return self.kept[i]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Opaque(), "__getitem__ itself draws from torch's generator"),
        (Looks(Compose([scale, noise])), "does something with what self.transform returned"),
        (Asks(Compose([scale, noise])), "does something with what self.transform returned"),
        (Memory(Compose([scale, noise])), "cannot be split"),
        (Stream(), "map-style"),
        (Pictures(n=0), "empty"),
        (7, "map-style"),
    ],
    ids=["opaque", "looks at it", "asks what it is", "keeps it", "iterable", "empty", "no dataset"],
)
def test_what_cannot_be_split_says_why_and_what_to_do(data: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as e:
        stoker.split(data)
    if "cannot be split" in str(e.value):
        assert "stoker.Staged(dataset, prepare=" in str(e.value)


def test_an_opaque_dataset_that_proves_deterministic_is_kept_whole() -> None:
    found = stoker.split(Pictures())
    assert found.exact
    assert [row.where for row in found.rows] == ["__getitem__"]


def test_the_report_reads() -> None:
    found = stoker.split(Pictures(Compose([scale, noise, halve])))
    assert isinstance(found, Split)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines] == ["cached", "cached", "each", "each"]
    assert "draws from torch's generator" in lines[2]
    assert "comes after a random one" in lines[3]
    assert "<td>noise</td>" in found._repr_html_()


class Evil:
    def __call__(self, x: Any) -> Any:
        return x

    def __repr__(self) -> str:
        return "Evil(<script>alert(1)</script>)"


def test_names_in_the_report_are_no_markup() -> None:
    assert "<script>" not in stoker.split(Pictures(Evil()))._repr_html_()


def test_code_that_a_base_class_has_too_is_looked_at_in_both() -> None:
    from stoker.staging.reach import reach

    class Base:
        def __call__(self, x: Any) -> Any:
            return x

    class One(Base):
        def __call__(self, x: Any) -> Any:
            return super().__call__(x) + 1

    class Two(Base):
        def __call__(self, x: Any) -> Any:
            return super().__call__(x) + 2

    one, two = (sorted(reach(made(), "it").code.values()) for made in (One, Two))
    assert len(one) == len(two) == 2
    assert one != two


def test_a_constructor_that_draws_is_no_call_that_draws() -> None:
    class Fixed:
        def __init__(self) -> None:
            self.at = float(np.random.default_rng(1).random())

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.at

    assert [row.cached for row in stoker.split(Pictures(Compose([Fixed(), noise]))).rows] == [True, True, False]
