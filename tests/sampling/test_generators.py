"""Random generators in objects: which are found, where, and that they are read, set and seeded in place."""

from __future__ import annotations

import copy
import functools
import random
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from stoker.core.random_state import get_state, set_state
from stoker.sampling.generators import AwaitedGenerator, find_generators, is_generator, seed_generator

in_module = random.Random(5)
made_later: Any = None

KINDS = {
    "random": lambda: random.Random(1),
    "RandomState": lambda: np.random.RandomState(1),
    "RandomState of PCG64": lambda: np.random.RandomState(np.random.PCG64(1)),
    "Generator": lambda: np.random.default_rng(1),
    "Generator of MT19937": lambda: np.random.Generator(np.random.MT19937(1)),
    "PCG64DXSM": lambda: np.random.Generator(np.random.PCG64DXSM(1)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(1)),
    "Philox": lambda: np.random.Philox(1),
    "torch": lambda: torch.Generator().manual_seed(1),
}


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random() if hasattr(generator, "random") else generator.random_raw())


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_read_set_and_seeded_in_place(kind: str) -> None:
    g = KINDS[kind]()
    assert is_generator(g)
    state = get_state(g)
    hash(state)
    first = draw(g)
    assert get_state(g) != state
    set_state(g, copy.deepcopy(state))
    assert get_state(g) == state
    assert draw(g) == first
    drawn = []
    for seed in (0, 1, 2, 1 << 32, (1 << 64) - 1, -1):
        seed_generator(g, seed)
        drawn.append(draw(g))
        draw(g)
        seed_generator(g, seed)
        assert draw(g) == drawn[-1]
    assert len(set(drawn)) >= 4  # a RandomState takes 32 bits, and the last two are one seed


def test_what_a_legacy_generator_keeps_beside_its_bits() -> None:
    g = np.random.RandomState(3)
    g.standard_normal()  # the second of two is kept
    state = get_state(g)
    second = g.standard_normal()
    set_state(g, state)
    assert g.standard_normal() == second
    g.standard_normal()
    seed_generator(g, 4)
    drawn = g.standard_normal()
    seed_generator(g, 4)
    assert g.standard_normal() == drawn


def test_numbers_of_neighbouring_seeds_are_not_related() -> None:
    from stoker.sampling.seeding import splitmix64

    g = np.random.default_rng(0)
    rows = []
    for k in range(256):
        seed_generator(g, splitmix64(k))
        rows.append(g.random(16))
    drawn = np.array(rows)
    assert abs(drawn.mean() - 0.5) < 0.02
    assert np.abs(np.corrcoef(drawn.T) - np.eye(16)).max() < 0.3


class Flip:
    """As MONAI's: a class' generator, until an instance gets its own."""

    R = np.random.RandomState(1)

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None:
            self.R = np.random.RandomState(seed)

    def __call__(self, x: Any) -> Any:
        return x


class Slots:
    __slots__ = ("empty", "rng")

    def __init__(self) -> None:
        self.rng = random.Random(1)


class Asks:
    """Code of the user's that a walk must not run."""

    @property
    def rng(self) -> Any:
        raise AssertionError("a property was read")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    def __iter__(self) -> Any:
        raise AssertionError("it was iterated over")

    def __len__(self) -> int:
        raise AssertionError("its length was asked for")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it was compared")

    __hash__ = None  # type: ignore[assignment]


class Names:
    def __getitem__(self, i: int) -> float:
        return in_module.random() + i


def paths(*roots: Any) -> list[str]:
    return [path for path, _ in find_generators(*roots)]


def test_where_generators_are_found() -> None:
    g = random.Random(1)
    assert find_generators(g) == [("0", g)]
    assert paths(types.SimpleNamespace(a=[1, {"k": (g,)}])) == ["0.a[1]['k'][0]"]
    assert paths(Flip(1)) == ["0.R"]
    assert paths([Flip(), Flip()]) == ["0[0].R"]
    assert paths(Slots()) == ["0.rng"]
    assert paths(functools.partial(max, g)) == ["0.args[0]"]
    assert paths(lambda: g) == ["0.g"]
    assert paths(g.random, None, Flip(2).__init__) == ["0", "2.R"]
    assert paths(types.SimpleNamespace(coin=g.random, length=[].__len__)) == ["0.coin"]
    assert paths(Names()) == [f"{__name__}.in_module"]
    assert paths(Subset(types.SimpleNamespace(t=Flip(1)), [0])) == ["0.dataset.t.R"]
    assert paths(torch.nn.Sequential(torch.nn.Linear(1, 1))) == []


def test_each_is_found_once_and_cycles_end() -> None:
    a = types.SimpleNamespace(g=random.Random(1))
    a.self, a.again = a, a.g
    assert paths([a, a], a) == ["0[0].g"]


def test_what_is_not_looked_into() -> None:
    assert (
        paths(Asks(), random, np.random, torch.default_generator, np.random.mtrand._rand, random.SystemRandom()) == []
    )
    assert paths([(f"{k}.jpg", k) for k in range(100_000)], TensorDataset(torch.zeros(5))) == []
    deep: Any = random.Random(1)
    for _ in range(2000):
        deep = [deep]
    assert paths(deep) == []
    wide = [[object() for _ in range(200)] for _ in range(200)]
    assert paths(wide) == []


def test_a_cache_around_a_dataset_changes_no_path() -> None:
    from stoker import Staged

    class Plain:
        def __init__(self) -> None:
            self.rng = random.Random(1)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> float:
            return i + self.rng.random()

    data = Plain()
    staged = Staged(data, prepare=float, augment=Flip(1))
    assert paths(data)[0] == "0.rng"
    assert paths(staged) == ["0.rng", "0.augment.R"]
    assert paths(Subset(staged, [0]))[0] == "0.dataset.rng"


def test_each_thread_has_its_own() -> None:
    local = threading.local()
    local.g = random.Random(1)
    assert paths(local) == ["0.g"]
    assert find_generators(local, thread_local=False) == []
    elsewhere: list[Any] = []
    thread = threading.Thread(target=lambda: elsewhere.extend(find_generators(local)))
    thread.start()
    thread.join()
    assert elsewhere == []


def watched(*roots: Any) -> AwaitedGenerator:
    watch = AwaitedGenerator([], [], [])
    find_generators(*roots, watch=watch)
    assert not watch.changed()
    return watch


def test_a_generator_that_is_made_later_is_noticed() -> None:
    lazy = types.SimpleNamespace(rng=None, x=1)
    watch = watched([lazy])
    lazy.x = 2
    assert not watch.changed()
    lazy.rng = random.Random(1)
    assert watch.changed()
    watch = watched([lazy])
    lazy.rng = random.Random(1)
    assert watch.changed()
    watch = watched(lazy)
    lazy.another = random.Random(1)
    assert watch.changed()
    per_worker: dict[int, Any] = {}
    watch = watched(types.SimpleNamespace(rngs=per_worker))
    per_worker[0] = random.Random(1)
    assert watch.changed()


def test_a_global_that_is_made_later_is_noticed(monkeypatch: Any) -> None:
    def f() -> Any:
        return made_later

    watch = watched(f)
    monkeypatch.setitem(globals(), "made_later", random.Random(1))
    assert watch.changed()
    assert paths(f) == [f"{__name__}.made_later"]
