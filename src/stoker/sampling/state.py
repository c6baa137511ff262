"""The state dict of a loader: what it holds, and how it is checked.

Nothing here is ever unpickled, and it takes a few kilobytes whatever the dataset's length. The keys are always the same
and each value is a plain one (or what a user's own ``state_dict()`` returned). So ``torch.save``, JSON and
``torch.distributed.checkpoint``, which wants a template of the same form, all take it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeVar

import torch

from ..core.errors import StateError
from ..core.random_state import NAMES, from_text, set_from_text
from ..core.types import State as ObjectState
from .stateful import alike

VERSION = 2  # since 2 random state is in base 64
MAX_INT = 1 << 63
MAX_WORKERS = 1 << 16
MAX_TASKS, MAX_SIZE = 1 << 40, 1 << 22  # of an epoch and of a batch; their product fits an index


@dataclass(frozen=True)
class Part:
    """What one worker did, where samples or the dataset's own state belong to a worker.

    Attributes:
        count: how many of its batches were delivered.
        at: how many it had made when ``state`` was taken; -1: at the end of the epoch before.
        state: of the dataset and its iterator (``fetcher.state_of``); None where neither is stateful.
    """

    count: int
    at: int = 0
    state: ObjectState = None

    @property
    def dataset_state(self) -> ObjectState:
        """The dataset's own state; None where it has none."""
        return None if self.state is None else self.state["dataset"]


@dataclass(frozen=True)
class State:
    """A loader's place in its run.

    Attributes:
        kind: "map" or "iterable".
        epoch: of the workers' life, for task seeds: 0 unless workers persist.
        next: the first task that has not been delivered.
        ahead: tasks behind it that were delivered already (``in_order=False``).
        samples: indices that the tasks before ``next`` took from the sampler.
        finished: the epoch is over; the next one is to begin.
        lives_on: the dataset's copies outlive an epoch: no workers, or persistent ones.
        workers: how many worked; 0 for none.
        task_seeds: random state is set per task.
        base_seed, shared_seed: torch's.
        length: of the sampler's data, where the order depends on it; else -1.
        sampler: the order's name, or how the sampler is put back.
        sampler_rng: random state where its order was drawn, by generator.
        sampler_state: its own, and how many tasks it had given then.
        world: of a distributed sampler: samples taken by all ranks before this division, ranks, and its epoch.
        generator: random state of the loader's generator.
        torch_rng: of torch's global one, where epochs are drawn from that. The script restores it; this tells whether.
        parts: by worker.
        turn: whose batch of an iterable dataset comes next.
        len_called: torch's, for its warning.
        batch_size: None where stoker does not know it.
    """

    kind: str
    epoch: int
    next: int
    ahead: tuple[int, ...]
    samples: int
    finished: bool
    lives_on: bool
    workers: int
    task_seeds: bool
    base_seed: int
    shared_seed: int | None
    length: int
    sampler: str
    sampler_rng: dict[str, str]
    sampler_state: ObjectState
    world: tuple[int, int, int] | None
    generator: str | None
    torch_rng: str | None
    parts: tuple[Part, ...]
    turn: int
    len_called: int | None
    batch_size: int | None

    def to_dict(self) -> dict[str, Any]:
        """The state dict."""
        values = dict(vars(self))
        values["ahead"] = list(self.ahead)
        values["world"] = None if self.world is None else list(self.world)
        values["sampler_rng"] = json.dumps(self.sampler_rng)
        values["sampler_state"] = _packed(self.sampler_state)
        values["parts"] = _packed([dict(vars(p)) for p in self.parts])
        return {"stoker": VERSION, **values}

    @classmethod
    def from_dict(cls, d: object) -> State:
        """The state that ``to_dict`` wrote. Keys that are not stoker's are left alone: accelerate adds one.

        Raises:
            StateError: anything else; the message says what is wrong with it.
        """
        if not isinstance(d, dict):
            raise StateError(f"a state dict is a dict, not {_short(d)}")
        version = d.get("stoker")
        if version is None:
            ours = " It looks like torchdata's." if "_snapshot" in d or "_num_yielded" in d else ""
            raise StateError(f"no state dict of a stoker.DataLoader: it has no key 'stoker'.{ours}")
        if type(version) is not int or version < 1:
            raise StateError(f"a state dict's version is a whole number, not {_short(version)}")
        if version > VERSION:
            raise StateError(f"the state dict has version {version}, this stoker reads up to {VERSION}: a newer stoker")
        names = {f.name for f in fields(cls)}
        missing = names - set(d)
        if missing:
            raise StateError(f"a state dict of version {version} lacks {', '.join(sorted(map(_short, missing)))}")
        return cls(**{name: _read(name, d[name]) for name in names})._consistent()

    def _consistent(self) -> State:
        if any(t < self.next for t in self.ahead):  # the first itself: so it was saved until 2026-11-23
            raise StateError(f"ahead={_short(list(self.ahead))} has tasks that next={self.next} has passed")
        if len(self.parts) not in ({max(1, self.workers)} if self.kind == "iterable" else {0, 1, self.workers}):
            raise StateError(f"{len(self.parts)} parts of {self.workers} workers over a dataset that is {self.kind}")
        if self.sampler_state is not None and self.sampler_state["given"] > self.next:
            raise StateError(f"sampler_state is of {self.sampler_state['given']} tasks, and next={self.next}")
        if self.sampler == "distributed" and self.world is None:
            raise StateError("world is None, and the sampler is distributed")
        return self


# -- checks, one for each key: each takes any object, and returns the value or raises ValueError


T = TypeVar("T")
Check: TypeAlias = Callable[[object], T]


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _whole(least: int, most: int = MAX_INT) -> Check[int]:
    def check(v: object) -> int:
        if type(v) is not int or not least <= v < most:
            raise ValueError(f"a whole number, {least:,} to {most - 1:,}")
        return v

    return check


def _one_of(*allowed: str) -> Check[str]:
    def check(v: object) -> str:
        if not isinstance(v, str) or v not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return v

    return check


def _order_name(v: object) -> str:
    if not isinstance(v, str) or len(v) > 100:
        raise ValueError("an order's name")
    return v


def _flag(v: object) -> bool:
    if type(v) is not bool:
        raise ValueError("True or False")
    return v


def _rng(v: object) -> str:
    if not isinstance(v, str):
        raise ValueError("random state as text")
    from_text(v)
    return v


def _cpu_rng(v: object) -> str:
    set_from_text(torch.Generator(), _rng(v))
    return str(v)


def _or_none(check: Check[T]) -> Check[T | None]:
    return lambda v: None if v is None else check(v)


def _numbers(v: object) -> tuple[int, ...]:
    if not isinstance(v, (list, tuple)) or len(v) > 1 << 20:
        raise ValueError("a list of whole numbers")
    return tuple(sorted({_whole(0)(x) for x in v}))


def _world(v: object) -> tuple[int, int, int]:
    if not isinstance(v, (list, tuple)) or len(v) != 3:
        raise ValueError("three whole numbers")
    return _whole(0)(v[0]), _whole(1)(v[1]), _whole(0, MAX_INT // 2)(v[2])


def _rngs(v: object) -> dict[str, str]:
    found = _json(v)
    if not isinstance(found, dict) or not set(found) <= NAMES | {"before"}:
        raise ValueError("random states by generator")
    return {name: _rngs(json.dumps(s)) if name == "before" else _rng(s) for name, s in found.items()}  # type: ignore[misc]


_OF_DATASET = {"dataset", "iterator", "ended"}


def _parts(v: object) -> tuple[Part, ...]:
    found = _unpacked(v)
    if not isinstance(found, list) or len(found) > MAX_WORKERS:
        raise ValueError("a list of parts")
    parts = []
    for p in found:
        if not isinstance(p, dict) or set(p) != {"count", "at", "state"}:
            raise ValueError("parts with count, at and state")
        part = Part(_whole(0)(p["count"]), _whole(-1)(p["at"]), p["state"])
        if part.at > part.count:
            raise ValueError("parts whose at is at most their count")
        if part.state is not None and (not isinstance(part.state, dict) or set(part.state) != _OF_DATASET):
            raise ValueError("parts whose state has dataset, iterator and ended")
        parts.append(part)
    return tuple(parts)


def _sampler_state(v: object) -> ObjectState:
    found = _unpacked(v)
    if found is None:
        return None
    if not isinstance(found, dict) or set(found) != {"given", "sampler", "iterator", "ended"}:
        raise ValueError("a sampler's state with given, sampler, iterator and ended")
    _whole(0)(found["given"])
    _flag(found["ended"])
    return found


_CHECKS: dict[str, Check[object]] = {
    "kind": _one_of("map", "iterable"),
    "epoch": _whole(0),
    "next": _whole(0, MAX_TASKS),
    "ahead": _numbers,
    "samples": _whole(0),
    "finished": _flag,
    "lives_on": _flag,
    "workers": _whole(0, MAX_WORKERS),
    "task_seeds": _flag,
    "base_seed": _whole(0),
    "shared_seed": _or_none(_whole(0)),
    "length": _whole(-1),
    "sampler": _order_name,
    "sampler_rng": _rngs,
    "sampler_state": _sampler_state,
    "world": _or_none(_world),
    "generator": _or_none(_rng),
    "torch_rng": _or_none(_cpu_rng),
    "parts": _parts,
    "turn": _whole(0),
    "len_called": _or_none(_whole(0)),
    "batch_size": _or_none(_whole(1, MAX_SIZE)),
}


def _read(name: str, value: object) -> Any:
    try:
        return _CHECKS[name](value)
    except (ValueError, RecursionError) as e:
        raise StateError(f"{name}={_short(value)} in a state dict: {e}") from None


def _packed(value: ObjectState) -> ObjectState:
    """As JSON if it comes back as it was, else itself."""
    if value is None:
        return "null"
    if value == []:
        return "[]"
    try:
        text = json.dumps(value)
        if alike(json.loads(text), value):
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    return value


def _unpacked(value: object) -> ObjectState:
    return _json(value) if isinstance(value, str) else value


def _json(value: object) -> ObjectState:
    if not isinstance(value, str):
        raise ValueError("JSON")
    return json.loads(value)  # json.JSONDecodeError is a ValueError
