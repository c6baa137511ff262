"""Datasets that fool a cache: with ``Staged`` each epoch is the one that torch's loader gives without it.

A case fails if a cached sample is served although something that made it has changed, or if what a sample draws in its
own way comes from the cache. ``docs/concepts/exact.md`` says what counts as an input.
"""

from __future__ import annotations

import builtins
import contextlib
import decimal
import itertools
import logging
import mmap
import queue
import random
import re
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import DataLoader

import stoker
from stoker.core.compare import equal_bits
from stoker.staging import change_watch
from stoker.staging.inputs import Inputs
from stoker.staging.trial import find_plan
from tests.exact.cases import CASES, Case, N, slow

EPOCHS = 4
ATTEMPTS = 3  # one in fifty pairs of runs of a random case differs by chance; a frozen sample differs in none
NOT_KEPT = {  # nothing is kept of these, and the reason names what stands in the way
    "FromTheWorkersSeed": "seed",
    "SeldomUrandom": "cannot be split",
    "BankOfWhatWasLoaded": "bank",
    "FlagReadByTheLoader": "gray",
    "DrawnOnAHelper": "reads do",
    "KeptByLruCacheAndChanged": "load",
    "OwnCacheSeldomChanged": "kept",
    "FileWithoutAName": "a file without a name",
    "BatchAsAWhole": "__getitems__",
    "ShuffledRarely": "queue",
    "OwnCursor": "a different result when repeated",
    "AddedInto": "total",
    "OfTwoInABatch": "__getitems__ does more",
    "QueueThatGrows": "queue",
    "SettingOfALibrary": "settings of libraries",
    "EnvironmentOfTheLastSample": "os.environ",
    "UfuncOfPython": "ufunc",
    "HashedFurther": "HASH",
    "ToldByAFrame": "reads the variables of its callers",
}


@pytest.fixture(autouse=True)
def _nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that are made again must find nothing: without them the result is the same."""
    monkeypatch.setattr(change_watch, "COMPARED", 0)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What cases change in the process is as before after each test."""
    monkeypatch.setenv("EXACT_SCALE", "1")
    monkeypatch.chdir(".")
    limit = sys.getrecursionlimit()
    texts = np.printoptions(), decimal.localcontext(), np.errstate(), torch.autocast("cpu", enabled=False)
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("TZ", "UTC")
        for context in (*texts, warnings.catch_warnings(), torch.enable_grad()):
            stack.enter_context(context)
        yield
    time.tzset()
    sys.setrecursionlimit(limit)
    torch.set_flush_denormal(False)
    MemoryFileSystem.store.clear()
    logging.getLogger("exact").setLevel(logging.NOTSET)


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def epochs(data: Case, asked: Any, workers: int) -> Iterator[list[Any]]:
    init, in_order = data.worker_init_fn, data.is_random
    loader = DataLoader(asked, batch_size=6, shuffle=not in_order, num_workers=workers, worker_init_fn=init)
    seed(2)
    for epoch in range(EPOCHS):
        data.between(epoch)
        made = []
        for k, batch in enumerate(loader):
            made.append(batch)
            data.within(k)
        yield made


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def epochs_of(case: Any, workers: int, path: Path, **cache: Any) -> tuple[list[list[Any]], str]:
    """The epochs of a new dataset, with a cache if there are settings of it; and why there is none."""
    seed(1)
    data = asked = case(folder(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stoker.StokerWarning)
        if cache:
            try:
                asked = stoker.Staged(data, **cache)
            except stoker.StokerError as e:
                return [], str(e)
        return list(epochs(data, asked, workers)), ""


def changing(made: list[list[Any]]) -> int:
    """How many samples differ from the epoch before."""
    rows = [torch.cat(batches).flatten(1) for batches in made]
    return sum(int((a != b).any(1).sum()) for a, b in itertools.pairwise(rows))


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_no_sample_is_another(name: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "exact_scale", None, raising=False)  # cases replace these; no later test sees that
    monkeypatch.setattr(np, "median", np.median)
    if name in ("FromTheWorkersSeed", "DrawnOnceForEachClass") and not workers:
        pytest.skip("without workers it is the same in each epoch")
    for attempt in range(ATTEMPTS):
        plain, _ = epochs_of(CASES[name], workers, tmp_path / f"plain{attempt}")
        made, reason = epochs_of(CASES[name], workers, tmp_path / f"staged{attempt}", cache_budget="10MB")
        if reason:
            assert name in NOT_KEPT, reason
            assert re.search(NOT_KEPT[name], reason)
            return
        if not CASES[name].is_random:
            for epoch in range(EPOCHS):
                assert equal_bits(made[epoch], plain[epoch]), f"epoch {epoch}"
            return
        if changing(made) >= changing(plain) // 2 > 0:
            return
    pytest.fail(f"{changing(made)} samples differ from the epoch before, {changing(plain)} without a cache")


def test_what_a_small_container_holds_is_an_input(tmp_path: Path) -> None:
    data: Any = CASES["HelpersInADictionary"](tmp_path)
    before = Inputs(data)
    data.helpers["b"].scale = 3.0
    assert before.changes(Inputs(data)) == ["dataset[0].helpers['b'].scale was 1.0 and is 3.0"]


def test_of_indices_of_two_types_one_is_kept(tmp_path: Path) -> None:
    data = CASES["TypeOfTheIndex"](tmp_path)
    staged = stoker.Staged(data, cache_budget="10MB")
    for _ in range(2):
        assert [staged[i][1] for i in range(N)] == [True] * N
        assert [staged[np.int64(i)][1] for i in range(N)] == [False] * N
    assert staged.account.filled == N


def test_what_has_no_digest_is_not_kept(tmp_path: Path) -> None:
    class _Opaque(Case):
        def __init__(self) -> None:
            self.memory = mmap.mmap(-1, 8)

        def __getitem__(self, i: int) -> Any:
            return torch.full((4,), float(i)).exp() + self.memory[0]

    with pytest.raises(stoker.StokerError, match=r"dataset\.memory is a mmap\.mmap, whose state cannot be read"):
        stoker.Staged(_Opaque())


class _Unseen(Case):
    """What no digest sees: a number in native memory."""

    def __init__(self) -> None:
        self.hidden = np.zeros(1)
        self.address = self.hidden.ctypes.data

    def __getitem__(self, i: int) -> Any:
        import ctypes

        return torch.full((4,), float(i)).exp().log() + ctypes.c_double.from_address(self.address).value


def test_served_samples_are_made_again_and_a_difference_ends_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_watch, "COMPARED", 8)
    data = _Unseen()
    hidden = data.hidden
    del data.hidden  # the digest has only a number
    staged = stoker.Staged(data, cache_budget="10MB")
    loader = stoker.DataLoader(staged, 6)
    first = torch.cat(list(loader))
    hidden[0] = 1.0
    with pytest.warns(stoker.StokerWarning, match=r"differs from when it was cached.*epochs 1 to 2 may have"):
        second = torch.cat(list(loader))
    assert not staged.usable
    assert torch.equal(second, first + 1)


class _Turns(Case):
    """Each sample is turned by what an iterator, a queue or native code gives next."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.angles = itertools.cycle([0, 1, 2, 3])
        self.queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.queue.put(0)
        if kind != "iterator":
            del self.angles
        if kind != "queue":
            del self.queue

    def __getitem__(self, i: int) -> Any:
        x = torch.from_numpy(slow(i, 4))
        if self.kind == "iterator":
            return x + next(self.angles)
        if self.kind == "queue":
            turn = self.queue.get()
            self.queue.put(turn + 1)
            return x + turn
        return x


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["iterator", "queue", "none"])
def test_samples_that_take_turns_are_made_once_each(kind: str) -> None:
    """Threads would make some twice, and so would the net: the next one would get another turn."""
    assert find_plan(_Turns(kind)).is_stateless == (kind == "none")


def test_looking_at_a_query_that_is_under_way_takes_none_of_its_rows(tmp_path: Path) -> None:
    data = CASES["OwnCursor"](tmp_path)
    for i in range(3):
        Inputs(data)
        assert data.rows.fetchone() == (i * i,)
