"""The state dict of a loader: its contents and its checks.

Nothing here is ever unpickled, and it takes a few kilobytes whatever the dataset's length. The keys are always the same
and each value is plain (or returned by a user's own ``state_dict()``). So ``torch.save``, JSON and
``torch.distributed.checkpoint``, which needs a template of the same form, all accept it.
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
from ..core.types import JsonObject
from ..core.types import State as ObjectState
from .shard import READ_HERE, Shard, ShardStart
from .stateful import alike

VERSION = 3  # 2 stores random state in base 64; 3 adds the rank that saved
ADDED = {"rank": 0, "ranks": 0, "division": None}  # defaults for keys that earlier versions lack
MAX_INT = (1 << 63) - 1
MAX_WORKERS = 1 << 16
MAX_RANKS = 1 << 24
MAX_TASKS, MAX_SIZE = 1 << 40, 1 << 22  # tasks per epoch and samples per batch; their product fits an index
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INT)]


@dataclass(frozen=True)
class WorkerPart:
    """One worker's progress, if samples or the dataset's own state belong to a worker."""

    count: Count  # batches of this worker that were delivered
    # batches it had made when ``state`` was taken; -1: at the end of the epoch before
    at: Annotated[int, Meta(ge=-1, le=MAX_INT)] = 0
    state: ObjectState = None  # of the dataset and its iterator (``fetcher.state_of``); None if neither is stateful
    # for an iterable dataset: number of the part over all ranks and workers (``sampling.shard``)
    shard: Count | None = None
    base_seed: Count | None = None  # of the rank that began it

    @property
    def dataset_state(self) -> ObjectState:
        return None if self.state is None else self.state["dataset"]


@dataclass(frozen=True)
class State:
    """A loader's position in its run."""

    kind: Literal["map", "iterable"]
    epoch: Count  # of the workers' life, for task seeds: 0 unless workers persist
    next: Annotated[int, Meta(ge=0, lt=MAX_TASKS)]  # the first task that has not been delivered
    # tasks after it that were already delivered (``in_order=False``)
    ahead: Annotated[tuple[Count, ...], Meta(max_length=1 << 20)]
    samples: Count  # indices that the tasks before ``next`` took from the sampler
    finished: bool  # the epoch is over, and the next one has not begun
    lives_on: bool  # the dataset's copies outlive an epoch: no workers, or persistent ones
    workers: Annotated[int, Meta(ge=0, lt=MAX_WORKERS)]  # number of workers; 0 for none
    task_seeds: bool  # random state is set per task
    # base_seed, shared_seed: torch's
    base_seed: Count
    shared_seed: Count | None
    length: Annotated[int, Meta(ge=-1, le=MAX_INT)]  # of the sampler's data, if the order depends on it; else -1
    sampler: Annotated[str, Meta(max_length=100)]  # the order's name, or how the sampler is restored
    sampler_rng: JsonObject  # by generator, the random state from which the order was drawn
    sampler_state: ObjectState  # the sampler's own state, and the number of tasks it had given by then
    # for a distributed sampler: samples taken by all ranks before this division, ranks, and its epoch
    world: tuple[Count, Annotated[int, Meta(ge=1, le=MAX_INT)], Annotated[int, Meta(ge=0, le=MAX_INT // 2)]] | None
    generator: str | None  # random state of the loader's generator
    # of torch's global generator, if epochs are drawn from it. The script restores it; this tells whether it did
    torch_rng: str | None
    parts: Annotated[tuple[WorkerPart, ...], Meta(max_length=MAX_WORKERS)]  # by worker
    turn: Count  # for an iterable dataset, the worker whose batch comes next
    batch_size: Annotated[int, Meta(ge=1, lt=MAX_SIZE)] | None  # None if stoker does not know it
    # rank, ranks: of the process that saved; 0 ranks: not known
    rank: Count
    ranks: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    # for an iterable dataset: ranks, and workers in each, that began the epoch; None: not known
    division: tuple[Annotated[int, Meta(ge=1, lt=MAX_RANKS)], Annotated[int, Meta(ge=0, lt=MAX_WORKERS)]] | None

    @property
    def is_over(self) -> bool:
        """Whether an iterable dataset has neither a batch left here nor a state to restore."""
        done = self.finished and not any(part.state for part in self.parts)
        return self.kind == "iterable" and (done or not self.parts)

    @property
    def torch_rng_restored(self) -> bool:
        """Whether torch's global generator is in its saved state."""
        now = torch.default_generator.get_state().numpy().tobytes()
        return self.torch_rng is None or from_text(self.torch_rng) == now

    @property
    def idle(self) -> bool:
        """Whether this rank has no part of an iterable dataset."""
        return self.division is not None and not self.parts

    @property
    def dealt_anew(self) -> bool:
        """Whether this rank has different parts of an iterable dataset from those of a new run."""
        if self.division is None:
            return False
        ranks, workers = self.division
        own = range(self.rank, ranks * max(1, workers), ranks)
        if ranks != self.ranks or len(own) != len(self.parts):
            return True
        return any(part.shard != shard for part, shard in zip(self.parts, own, strict=True))

    @property
    def places(self) -> tuple[ShardStart, ...]:
        """Where the parts were begun, if they were redistributed; else empty."""
        if self.division is None or not self.dealt_anew:
            return ()
        ranks, workers = self.division[0], max(1, self.division[1])
        parts = [(int(part.shard or 0), int(part.base_seed or 0)) for part in self.parts]
        return tuple(ShardStart(shard // ranks, workers, seed, Shard(shard, ranks * workers)) for shard, seed in parts)

    @property
    def begun_by_workers(self) -> bool:
        """Whether workers began this epoch."""
        return (self.workers if self.division is None else self.division[1]) > 0

    def check_worker_can_read(self) -> None:
        """Raises StateError if a worker could not reread what the training process has read."""
        if self.kind == "iterable" and self.next and not self.finished and "before" in self.sampler_rng:
            raise StateError(READ_HERE)

    def to_dict(self) -> JsonObject:
        values = dict(vars(self))
        values["ahead"] = list(self.ahead)
        for name in ("world", "division"):
            values[name] = None if values[name] is None else list(values[name])
        values["sampler_rng"] = json.dumps(self.sampler_rng)
        values["sampler_state"] = write_packed(self.sampler_state)
        values["parts"] = write_packed([dict(vars(p)) for p in self.parts])
        return {"stoker": VERSION, **values}

    @classmethod
    def from_dict(cls, d: object) -> State:
        """Reads a state that ``to_dict`` wrote. Ignores keys that are not stoker's: accelerate adds one. Raises
        StateError, which says what is wrong, for anything else."""
        if not isinstance(d, dict):
            raise StateError(f"the state dict must be a dict, not {_short(d)}")
        version = d.get("stoker")
        if version is None and ("_snapshot" in d or "_num_yielded" in d):
            raise StateError(
                "the state dict was saved by torchdata's StatefulDataLoader, and only that loader can read it"
            )
        if version is None:
            raise StateError("the state dict was not saved by a stoker.DataLoader: it has no key 'stoker'")
        if type(version) is not int or version < 1:
            raise StateError(f"the version of a state dict must be a positive integer, not {_short(version)}")
        if version > VERSION:
            raise StateError(
                f"the state dict has version {version}, but this stoker reads up to version {VERSION}. Upgrade stoker"
            )
        types = get_type_hints(cls, include_extras=True)
        if version < 3:
            d = {**d, **ADDED}
        missing = set(types) - set(d)
        if missing:
            raise StateError(
                f"the state dict has version {version} but lacks {', '.join(sorted(map(_short, missing)))}"
            )
        return cls(**{name: _read(name, d[name], of) for name, of in types.items()})._consistent()

    def _consistent(self) -> State:
        if any(t < self.next for t in self.ahead):  # not <=: until 2026-11-23, ``next`` itself was saved too
            raise StateError(f"invalid state dict: ahead={_short(list(self.ahead))} has tasks before next={self.next}")
        if len(self.parts) not in self._counts_of_parts():
            raise StateError(
                f"invalid state dict: {len(self.parts)} parts do not fit {self.workers} workers with a {self.kind} "
                "dataset"
            )
        if self.sampler_state is not None and self.sampler_state["given"] > self.next:
            raise StateError(
                f"invalid state dict: sampler_state is at task {self.sampler_state['given']}, past next={self.next}"
            )
        if self.sampler == "distributed" and self.world is None:
            raise StateError("invalid state dict: world is None although the sampler is distributed")
        self._check_division()
        return self

    def _counts_of_parts(self) -> set[int]:
        if self.kind == "map":
            return {0, 1, self.workers}
        idle = {0} if self.division is not None and not self.workers else set()
        return {max(1, self.workers), *idle}

    def _check_division(self) -> None:
        if (self.division is not None) != (self.kind == "iterable" and self.ranks > 0):
            raise StateError(
                f"invalid state dict: division={self.division} does not fit a {self.kind} dataset saved by "
                f"{self.ranks} ranks"
            )
        if self.division is None:
            return
        count = self.division[0] * max(1, self.division[1])
        shards = {p.shard for p in self.parts if p.shard is not None and p.shard < count and p.base_seed is not None}
        if len(shards) != len(self.parts):
            raise StateError(
                f"invalid state dict: its {len(self.parts)} parts do not fit a division among {self.division} ranks "
                "and workers"
            )


# -- reading


def _read(name: str, value: object, of: object) -> Any:
    """Returns a key's value, if it has the right type and passes ``_CHECKS``. Raises StateError otherwise."""
    try:
        found = read_packed(value) if name in _PACKED else value
        found = msgspec.convert(found, of)
        if found is not None and name in _CHECKS:
            _CHECKS[name](found)
        return found
    except Exception as e:  # a value may be any object, and raise anything when it is inspected
        raise StateError(f"invalid state dict: {name}={_short(value)}: {e}") from None


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_rngs(states: JsonObject) -> None:
    for name, state in states.items():
        if name == "before" and isinstance(state, dict) and "before" not in state:
            _check_rngs(state)
        elif name in NAMES and isinstance(state, str):
            from_text(state)
        else:
            raise ValueError("expected a dict of random states by generator")


def _check_parts(parts: tuple[WorkerPart, ...]) -> None:
    for part in parts:
        if part.at > part.count:
            raise ValueError("expected parts with at <= count")
        if part.state is not None and (not isinstance(part.state, dict) or set(part.state) != _OF_DATASET):
            raise ValueError("expected parts whose state has the keys dataset, iterator and ended")


def _check_sampler_state(state: ObjectState) -> None:
    if not isinstance(state, dict) or set(state) != {"given", "sampler", "iterator", "ended"}:
        raise ValueError("expected a sampler state with the keys given, sampler, iterator and ended")
    msgspec.convert(state["given"], Count)
    msgspec.convert(state["ended"], bool)


_OF_DATASET = {"dataset", "iterator", "ended"}
_PACKED = {"sampler_rng", "sampler_state", "parts"}  # written as JSON if that loses nothing
_CHECKS: dict[str, Callable[..., object]] = {
    "sampler_rng": _check_rngs,
    "sampler_state": _check_sampler_state,
    "generator": from_text,
    "torch_rng": lambda text: set_from_text(torch.Generator(), text),
    "parts": _check_parts,
}


def read_packed(value: ObjectState) -> ObjectState:
    """Reads the result of ``write_packed``."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as e:
        raise StateError(f"invalid state dict: a text is not valid JSON: {e}") from None


def write_packed(value: ObjectState) -> ObjectState:
    """Returns the value as JSON if that round-trips, else unchanged."""
    try:
        text = json.dumps(value)
        if alike(json.loads(text), value):
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    return value
