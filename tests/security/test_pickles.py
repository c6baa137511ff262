"""Nothing that comes from a file, another process that was not started here, or the network is unpickled."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.core.errors import StokerWarning
from stoker.core.types import Sample
from stoker.staging import late_plan, node_cache, plain
from stoker.staging.isolate import run_isolated
from stoker.staging.own_caches import Path as Attributes
from stoker.staging.pure_calls import MemoPlan
from stoker.staging.store import block
from stoker.staging.store.decode import Layout
from stoker.staging.store.encode import CacheError, take
from stoker.staging.store.memory import MemoryTables
from stoker.staging.store.store import Store, size_of
from stoker.staging.trial import TrialResult, find_plan
from stoker.staging.value_digests import Entry

N = 64
SRC = Path(stoker.__file__).parents[1]
# Modules that unpickle, or read what marshal writes, and from whom.
UNPICKLES = {
    "core/random_state.py": "this process",
    "core/shared.py": "memory that workers inherit",
    "sampling/stateful.py": "this process, and its workers by pipes",
    "staging/isolate.py": "a forked child, by a pipe",
    "staging/late_plan.py": "memory that workers inherit",
    "staging/store/decode.py": "memory that workers inherit, if Memory.pickles",
    "transport/codec.py": "workers, by pipes and memory that they inherit; those of other nodes by Ray, which unpickles",
    "workers/exceptions.py": "workers, by pipes",
    "workers/fork_server.py": "the fork server, by a socket that it inherits",
    "workers/fork_server_main.py": "the parent, by the same socket",
    "workers/handover.py": "the parent, by memory that workers inherit",
    "workers/process_main.py": "the parent, by pipes",
    "stoker_ray/shipment.py": "the trainer, by Ray, which unpickles",
}


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_whoever_unpickles_is_known() -> None:
    """A new one wants a reason why nobody else can write what it reads."""
    reads = re.compile(r"\b(pickle|marshal|cloudpickle|ForkingPickler)\.(loads?\(|Unpickler)|\btorch\.load\(")
    found = {str(path.relative_to(SRC)) for path in SRC.rglob("*.py") if reads.search(path.read_text())}
    assert {name.removeprefix("stoker/") for name in found} == set(UNPICKLES)


def test_memory_of_ranks_and_nodes_is_never_unpickled(tmp_path: Path) -> None:
    """Also where somebody who got hold of it writes a sample with a pickle into it."""
    memory, *_ = node_cache.new_memories(N, None, 1 << 20, 1)
    assert not memory.pickles
    theirs = Store(MemoryTables.of(os.dup(memory.fd), pickles=True), N, 1 << 20)
    theirs.admit({i: take({"x": Evil(tmp_path / f"{i}")}) for i in range(N)})
    assert theirs.account.filled == N
    ours = Store(memory, N, 1 << 20)
    with pytest.raises(CacheError, match="invalid sample type"):
        ours.read(int(ours.locations[3]))
    assert not list(tmp_path.iterdir())
    theirs.read(int(theirs.locations[3]))  # else this test would show nothing
    assert [p.name for p in tmp_path.iterdir()] == ["3"]


def test_memory_stays_without_pickles_wherever_it_goes() -> None:
    for pickles in (False, True):
        memory = MemoryTables(size_of(N, 1 << 20), pickles)
        staged = stoker.Staged(list(range(N)), prepare=torch.tensor, _memories=(memory,), cache="ram")
        late = late_plan.LatePlan(lambda late: False)
        late.publish(staged)
        found: Any = late.read(staged.dataset)
        assert found._store.medium.pickles is pickles
        made, arguments = memory_reduced(memory)
        assert made(*arguments).pickles is pickles


def memory_reduced(memory: MemoryTables) -> Any:
    """As a worker that is started by spawn gets it."""
    from multiprocessing import context

    class Popen:
        DupFd = staticmethod(lambda fd: type("Fd", (), {"detach": lambda self: os.dup(fd)})())

        def duplicate_for_child(self, fd: int) -> int:
            return fd

    context.set_spawning_popen(Popen())  # type: ignore[arg-type]
    try:
        return memory.__reduce__()
    finally:
        context.set_spawning_popen(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", ["memory of ranks", "a file"])
def test_what_needs_a_pickle_is_not_kept_there(kept: str, tmp_path: Path) -> None:
    where: Any = {"cache": "disk", "cache_dir": tmp_path}
    if kept != "a file":
        where = {"cache": "ram", "_memories": node_cache.new_memories(N, None, 1 << 20, 1)}
    staged = stoker.Staged(list(range(N)), prepare=lambda i: {"x": complex(i, 1)}, **where)
    with pytest.warns(StokerWarning, match="has a complex, which only an in-memory cache of one process can hold"):
        assert [staged[i]["x"] for i in range(N)] == [complex(i, 1) for i in range(N)]
    assert not staged.account.filled


def test_in_memory_of_one_process_it_is() -> None:
    staged = stoker.Staged(list(range(N)), prepare=lambda i: {"x": complex(i, 1)}, cache="ram")
    assert [staged[i]["x"] for i in range(N)] == [complex(i, 1) for i in range(N)]
    assert staged.account.filled == N


class Whole:
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Sample:
        return torch.arange(i + 1.0).exp().sum()


class WithPickle(Whole):
    def __getitem__(self, i: int) -> Sample:
        return complex(i, 1)


class Cut(Whole):
    def __getitem__(self, i: int) -> Sample:
        x = torch.arange(i + 50_000.0).exp().log()[:16]
        return x + torch.rand(1)


class Pairs(Whole):
    def load(self, i: int) -> torch.Tensor:
        return torch.arange(i + 200_000.0).exp().log()[:16]

    def __getitem__(self, i: int) -> Sample:
        other = (i + int(torch.randint(8, ()))) % N
        return self.load(i), self.load(other)


class Opens(Whole):
    handle: Any = None

    def __getitem__(self, i: int) -> Sample:
        if self.handle is None:
            self.handle = {"numbers": [1, 2.5, None, b"x", float("inf")]}
        return super().__getitem__(i)


class Fails(Whole):
    def __getitem__(self, i: int) -> Sample:
        raise OSError("no such file \udcff")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "dataset", [Whole(), WithPickle(), Cut(), Pairs(), Opens(), Fails()], ids=lambda x: type(x).__name__
)
def test_what_a_trial_found_travels_as_json(dataset: Any) -> None:
    for _ in range(9):  # on a busy machine the calls may have seemed not to be worth it
        found = run_isolated(lambda: find_plan(dataset, 20.0))
        if found.memo or not isinstance(dataset, Pairs):
            break
    again = plain.loads(plain.dumps(("", "", found)))
    assert again == ("", "", found)
    assert type(again[2]) is TrialResult
    kept = found.plan or found.memo
    assert bool(kept and kept.pickled) is isinstance(dataset, WithPickle)
    if isinstance(dataset, Pairs):
        assert isinstance(found.memo, MemoPlan)


def test_only_plain_values_travel() -> None:
    entry = Entry("a dict", {"a": (1, -(1 << 70), 2.5), "b": frozenset({b"\xff", None, True})}, True)
    paths: list[Attributes] = [("dataset", "cache")]
    assert plain.loads(plain.dumps([entry, paths, {1: {2}, (3, "x"): set()}])) == [
        entry,
        paths,
        {1: {2}, (3, "x"): set()},
    ]
    for value in (object(), torch.zeros(1), os.system, Evil(Path("x")), (1, [Evil(Path("x"))])):
        with pytest.raises(TypeError):
            plain.dumps(value)
    for data in (b'["Evil", "x"]', b'["system", "id"]', pickle.dumps(1), b"", b'["tuple"', b'["bytes", "zz"]'):
        with pytest.raises((ValueError, LookupError, TypeError)):
            plain.loads(data)


def test_a_type_with_a_pickle_is_refused() -> None:
    type_spec, leaves = take({"x": complex(1, 2)})
    assert Layout(type_spec).put(leaves) == {"x": complex(1, 2)}
    with pytest.raises(CacheError):
        Layout(type_spec, pickles=False)
    with pytest.raises(CacheError):
        block.parts(block.pack(type_spec, leaves, 0), 0, pickles=False)
