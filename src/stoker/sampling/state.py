"""The state dict of a loader: what it holds, and how it is checked.

Nothing here is ever unpickled, and it takes a few kilobytes whatever the dataset's length. The keys are always the same
and each value is a plain one (or what a user's own ``state_dict()`` returned). So ``torch.save``, JSON and
``torch.distributed.checkpoint``, which wants a template of the same form, all take it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import msgspec
import torch
from msgspec import Meta

from ..core.errors import StateError
from ..core.random_state import NAMES, from_text, set_from_text
from ..core.types import State as ObjectState
from .stateful import alike

VERSION = 2  # since 2 random state is in base 64
MAX_INT = (1 << 63) - 1
MAX_WORKERS = 1 << 16
MAX_TASKS, MAX_SIZE = 1 << 40, 1 << 22  # of an epoch and of a batch; their product fits an index
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INT)]


@dataclass(frozen=True)
class Part:
    """What one worker did, where samples or the dataset's own state belong to a worker.

    Attributes:
        count: how many of its batches were delivered.
        at: how many it had made when ``state`` was taken; -1: at the end of the epoch before.
        state: of the dataset and its iterator (``fetcher.state_of``); None where neither is stateful.
    """

    count: Count
    at: Annotated[int, Meta(ge=-1, le=MAX_INT)] = 0
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
        batch_size: None where stoker does not know it.
    """

    kind: Literal["map", "iterable"]
    epoch: Count
    next: Annotated[int, Meta(ge=0, lt=MAX_TASKS)]
    ahead: Annotated[tuple[Count, ...], Meta(max_length=1 << 20)]
    samples: Count
    finished: bool
    lives_on: bool
    workers: Annotated[int, Meta(ge=0, lt=MAX_WORKERS)]
    task_seeds: bool
    base_seed: Count
    shared_seed: Count | None
    length: Annotated[int, Meta(ge=-1, le=MAX_INT)]
    sampler: Annotated[str, Meta(max_length=100)]
    sampler_rng: dict[str, Any]
    sampler_state: ObjectState
    world: tuple[Count, Annotated[int, Meta(ge=1, le=MAX_INT)], Annotated[int, Meta(ge=0, le=MAX_INT // 2)]] | None
    generator: str | None
    torch_rng: str | None
    parts: Annotated[tuple[Part, ...], Meta(max_length=MAX_WORKERS)]
    turn: Count
    batch_size: Annotated[int, Meta(ge=1, lt=MAX_SIZE)] | None

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
        types = get_type_hints(cls, include_extras=True)
        missing = set(types) - set(d)
        if missing:
            raise StateError(f"a state dict of version {version} lacks {', '.join(sorted(map(_short, missing)))}")
        return cls(**{name: _read(name, d[name], of) for name, of in types.items()})._consistent()

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


# -- reading


def _read(name: str, value: object, of: Any) -> Any:
    """The value of a key, if it is of its type and ``_CHECKS`` has nothing against it."""
    try:
        found = json.loads(value) if name in _PACKED and isinstance(value, str) else value
        found = msgspec.convert(found, of)
        if found is not None and name in _CHECKS:
            _CHECKS[name](found)
        return found
    except (ValueError, RecursionError) as e:  # the errors of json and of msgspec are ValueErrors
        raise StateError(f"{name}={_short(value)} in a state dict: {e}") from None


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_rngs(states: dict[str, Any]) -> None:
    for name, state in states.items():
        if name == "before" and isinstance(state, dict) and "before" not in state:
            _check_rngs(state)
        elif name in NAMES and isinstance(state, str):
            from_text(state)
        else:
            raise ValueError("random states by generator")


def _check_parts(parts: tuple[Part, ...]) -> None:
    for part in parts:
        if part.at > part.count:
            raise ValueError("parts whose at is at most their count")
        if part.state is not None and (not isinstance(part.state, dict) or set(part.state) != _OF_DATASET):
            raise ValueError("parts whose state has dataset, iterator and ended")


def _check_sampler_state(state: ObjectState) -> None:
    if not isinstance(state, dict) or set(state) != {"given", "sampler", "iterator", "ended"}:
        raise ValueError("a sampler's state with given, sampler, iterator and ended")
    msgspec.convert(state["given"], Count)
    msgspec.convert(state["ended"], bool)


_OF_DATASET = {"dataset", "iterator", "ended"}
_PACKED = {"sampler_rng", "sampler_state", "parts"}  # written as JSON where that says the same
_CHECKS: dict[str, Callable[[Any], object]] = {
    "sampler_rng": _check_rngs,
    "sampler_state": _check_sampler_state,
    "generator": from_text,
    "torch_rng": lambda text: set_from_text(torch.Generator(), text),
    "parts": _check_parts,
}


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
