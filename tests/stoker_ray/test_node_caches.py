"""Nodes keep what their workers have prepared: the same batches, hardly a sample made again, none of another dataset."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.staging import isolate, pure_calls
from stoker_ray import cluster_cache
from stoker_ray.pool import RemotePool

from .test_remote_pool import bits, loader_of, nodes_of, ray  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:Cache discarded, the dataset changed"),
]
N = 64


def shifted(x: torch.Tensor) -> tuple:
    time.sleep(0.003)
    return x + torch.rand(1), np.random.rand(), random.random()


class Photos(Dataset):
    """Reads a file. Workers note who has prepared which sample."""

    def __init__(self, folder: Path) -> None:
        self.file, self.scale = folder / "scale", 1.0

    @property
    def log(self) -> Path:
        """Beside the folder: a file that changes is not of those that samples are read from."""
        return self.file.parent.with_suffix(".log")

    def __len__(self) -> int:
        return N

    def load(self, i: int) -> torch.Tensor:
        time.sleep(0.003)
        if isolate._output < 0:  # else it is the trial, which may not write
            with open(self.log, "a") as log:
                log.write(f"{multiprocessing.parent_process().pid} {i}\n")  # type: ignore[union-attr]
        return torch.arange(900).sin() * i * self.scale * float(self.file.read_text())

    def __getitem__(self, i: int) -> tuple:
        return shifted(self.load(i))


class Pairs(Photos):
    """Draws first and loads afterwards, so calls are kept."""

    def __getitem__(self, i: int) -> tuple:
        j = random.randrange(N)
        time.sleep(0.006 * random.random())
        return self.load(i) + self.load(j), torch.rand(1)


class Run:
    """A staged dataset with nodes, beside the same dataset as a script has it. Each epoch is compared."""

    def __init__(self, kind: type[Photos], folder: Path, fake: object) -> None:
        for name in ("staged", "plain"):
            (folder / name).mkdir()
            (folder / name / "scale").write_text("1.5")
        self.staged, self.plain = kind(folder / "staged"), kind(folder / "plain")
        found = kind is Pairs  # by the trial
        cached = stoker.Staged(self.staged) if found else stoker.Staged(range(N), self.staged.load, shifted)
        self.one, self.other = loader_of(cached, "ray"), loader_of(self.plain, "process")
        self.fake = fake

    @property
    def made(self) -> int:
        """Batches of nodes."""
        return sum(actor.made for actor in self.fake.actors)

    def loads(self) -> int:
        """How often workers of nodes have prepared a sample: those of this machine have this process as parent."""
        by_parent = Counter(line.split()[0] for line in self.staged.log.read_text().splitlines())
        return by_parent.total() - by_parent[str(os.getpid())]

    def until(self, done) -> None:
        deadline = time.monotonic() + 120
        while not done():
            state = torch.get_rng_state()
            got = bits(self.one)
            torch.set_rng_state(state)
            assert got == bits(self.other)
            assert time.monotonic() < deadline, nodes_of(self.one).nodes

    def warm(self) -> str:
        """Epochs until all nodes have made batches of this dataset. Returns its key."""
        nodes, actors = len(self.fake.infos), self.fake.actors
        before = {id(actor): actor.made for actor in actors}
        self.until(lambda: len(actors) == nodes and all(a.made > before.get(id(a), 0) + 30 for a in actors))
        return nodes_of(self.one).key

    def serves_from_caches(self) -> None:
        """Workers of nodes, the same as before, make batches and hardly any sample."""
        key, made, loads = nodes_of(self.one).key, self.made, self.loads()
        self.until(lambda: self.made > made + 30)
        # Now and then each worker makes a sample again and compares.
        assert self.loads() - loads < (self.made - made) * 4 / 2
        assert nodes_of(self.one).key == key


@pytest.fixture
def no_repeats(monkeypatch):
    """No node answers with an error, which would be hidden: the batch is made here again."""
    repeated = []
    monkeypatch.setattr(RemotePool, "_repeat_here", lambda pool, call, task: repeated.append(task))
    yield
    assert not repeated


def test_nodes_serve_what_they_have_prepared_or_ask_each_other(ray, no_repeats, tmp_path, monkeypatch):  # noqa: F811
    found, ask = [], cluster_cache.NodeCache._ask_nodes

    def ask_nodes(cache, indices):
        answer = ask(cache, indices)
        found.extend(answer.head)
        return answer

    monkeypatch.setattr(cluster_cache.NodeCache, "_ask_nodes", ask_nodes)
    run = Run(Photos, tmp_path, ray)
    run.warm()
    run.serves_from_caches()
    assert found


def test_a_dataset_that_changes_is_never_served_from_old_caches(ray, no_repeats, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(pure_calls, "PAYS", 1e9)
    ray.infos.pop("1")
    run = Run(Pairs, tmp_path, ray)
    keys, memories = [run.warm()], caches_of_this_process()
    run.serves_from_caches()
    run.staged.scale = run.plain.scale = 2.5
    keys.append(run.warm())
    for dataset in (run.staged, run.plain):
        dataset.file.write_text("3.25")
    keys.append(run.warm())
    assert len(set(keys)) == 3
    assert caches_of_this_process() == memories  # the old ones are gone


def caches_of_this_process() -> int:
    out = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            out += "stoker-cache" in os.readlink(f"/proc/self/fd/{fd}")
    return out
