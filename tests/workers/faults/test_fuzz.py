"""Bytes that nobody meant: as caches and states. What comes of them is right, or an error of
stoker's own; never another's, and never a wrong sample."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from stoker.core.errors import StateError, StokerError
from stoker.staging.store import folder
from stoker.staging.store.head import StoreHead

SEED = int(os.environ.get("STOKER_SEED", "0"))
relaxed = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


# -- caches

N = 24


def number(i: int) -> torch.Tensor:
    return torch.full((600,), i, dtype=torch.int32)


def ragged(i: int) -> Any:
    return torch.full((1 + i % 5,), i, dtype=torch.int32), f"sample {i}"


MADE = {"columns": number, "heap": ragged}


def cache(where: Path, kind: str) -> Any:
    return stoker.Staged(list(range(N)), prepare=MADE[kind], cache="disk", cache_dir=where, cache_budget="4MB")


@pytest.fixture(scope="module", params=list(MADE))
def whole(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A cache that is all in."""
    where = tmp_path_factory.mktemp("cache")
    staged = cache(where, request.param)
    for i in range(N):
        staged[i]
    assert staged.account.filled == N
    return request.param, where


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return torch.equal(a[0], b[0]) and a[1] == b[1]
    return torch.equal(a, b)


def hurt(path: Path, rng: random.Random) -> str:
    """Another content for a file, one of several ways."""
    size = path.stat().st_size
    way = rng.choice(["random", "empty", "cut", "longer", "some", "zeros", "gone"])
    with open(path, "r+b") as file:
        if way == "random":
            file.write(rng.randbytes(min(size, 4096)))
        elif way == "zeros":
            file.write(bytes(min(size, 4096)))
        elif way == "empty":
            file.truncate(0)
        elif way == "cut":
            file.truncate(rng.randrange(max(1, size)))
        elif way == "longer":
            file.seek(0, os.SEEK_END)
            file.write(rng.randbytes(rng.randrange(1, 5000)))
        elif way == "some":
            for _ in range(rng.randrange(1, 20)):
                file.seek(rng.randrange(max(1, min(size, 20_000))))
                file.write(rng.randbytes(rng.randrange(1, 9)))
    if way == "gone":
        path.unlink()
    return way


@pytest.mark.parametrize("seed", range(SEED, SEED + 8))
@pytest.mark.few(1)
def test_files_of_a_cache(whole: tuple[str, Path], tmp_path: Path, seed: int) -> None:
    kind, source = whole
    where = tmp_path / "cache"
    shutil.copytree(source, where)
    rng = random.Random(seed)
    (found,) = folder.caches(where)
    held = sorted(p for p in found.iterdir() if p.is_file())
    for path in rng.sample(held, rng.randrange(1, 4)):
        print("seed", seed, path.name, hurt(path, rng))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            try:
                staged = cache(where, kind)
                for i in range(N):
                    assert same(staged[i], MADE[kind](i)), i
            except StokerError as e:
                print(e)


def wide(i: int) -> torch.Tensor:
    return torch.full((30_000,), i, dtype=torch.int32)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("prepare", "head"), [(ragged, "gone"), (ragged, "heap_end"), (wide, "gone"), (wide, "rows_taken")]
)
def test_a_head_that_has_forgotten_what_is_taken(tmp_path: Path, prepare: Any, head: str) -> None:
    """What is let in anew is not laid over samples that this process has found to be whole: in the heap, and among rows
    where not all fit and so each lies where there was room."""

    def opened() -> Any:
        return stoker.Staged(list(range(N)), prepare=prepare, cache="disk", cache_dir=tmp_path, cache_budget="1MB")

    staged = opened()
    for i in range(N):
        staged[i]
    del staged
    (found,) = folder.caches(tmp_path)
    if head == "gone":
        (found / "head.npy").unlink()
    else:
        np.lib.format.open_memmap(found / "head.npy", mode="r+")[vars(StoreHead)[head].index] = 0
    place = np.lib.format.open_memmap(found / "place.npy", mode="r+")
    place[::2] = 0  # to be let in anew
    staged = opened()
    for i in [*range(1, N, 2), *range(N), *reversed(range(N))]:
        assert same(staged[i], prepare(i)), i


@pytest.mark.parametrize("seed", range(SEED, SEED + 2))
@pytest.mark.few(1)
def test_listing_such_caches(
    whole: tuple[str, Path], tmp_path: Path, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    from stoker.commands import main

    where = tmp_path / "cache"
    shutil.copytree(whole[1], where)
    rng = random.Random(seed)
    (found,) = folder.caches(where)
    for path in rng.sample(sorted(p for p in found.iterdir() if p.is_file()), 2):
        print("seed", seed, path.name, hurt(path, rng))
    code = main.main(["cache", "ls", "--dir", str(where)])
    out = capfd.readouterr()
    assert code == 0, out
    assert "Traceback" not in out.err + out.out


# -- states, profiles

anything: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def loader(workers: int = 0) -> Any:
    return stoker.DataLoader(range(40), batch_size=4, num_workers=workers, shuffle=True)


@relaxed
@given(st.data())
@pytest.mark.slow
def test_states_with_parts_exchanged(data: st.DataObject) -> None:
    """A good one in which some values are others."""
    one = loader()
    it = iter(one)
    next(it)
    state = one.state_dict()
    for key in data.draw(st.lists(st.sampled_from(sorted(state)), min_size=1, max_size=3)):
        state[key] = data.draw(anything)
    other = loader()
    try:
        other.load_state_dict(state)
        left = [int(i) for batch in other for i in batch]
    except StateError:
        return
    assert len(left) == len(set(left)) <= 40
