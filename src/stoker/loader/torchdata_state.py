"""Reads the state dict of torchdata's ``StatefulDataLoader``, so that its run can go on here.

torchdata writes one form without workers and one with them::

    {"_num_yielded": ..., "_sampler_iter_state": ..., "dataset_state": ..., "fetcher_state": ...}
    {"_snapshot": {"_snapshot_step": ..., "_main_snapshot": {...}, "_worker_snapshots": {...}},
     "_steps_since_snapshot": ...}

What it does not write cannot be checked: the dataset's length, the number of ranks, the batch size of some samplers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _DatasetKind
from torch.utils.data.distributed import DistributedSampler

from ..core.errors import StateError, one_line
from ..core.random_state import preserved, to_text
from ..core.types import JsonObject, LoaderLike
from ..core.types import State as ObjectState
from ..sampling.replay import FOREIGN, REPLAYED
from ..sampling.state import Part, State


class Converted(NamedTuple):
    """A state, and how many batches after it were delivered: these are made again and dropped."""

    state: State
    skip: int


class _Run(NamedTuple):
    """Both forms in one."""

    workers: int  # 0 for none
    main: JsonObject  # states of the samplers
    step: int  # batches delivered when these were noted
    since: int  # batches delivered after that
    of_workers: Sequence[JsonObject]  # states of the workers' datasets; without workers one
    turn: int  # the worker whose batch comes next
    finished: bool

    @property
    def done(self) -> int:
        return self.step + self.since


def recognised(state_dict: object) -> bool:
    """Whether a state dict is torchdata's."""
    if not isinstance(state_dict, dict) or "stoker" in state_dict:
        return False
    return "_snapshot" in state_dict or "_num_yielded" in state_dict


def convert(state_dict: JsonObject, loader: LoaderLike) -> Converted:
    """The state of a run that torchdata's loader began. Raises StateError: it lacks what is needed to go on."""
    try:
        run = _with_workers(state_dict) if "_snapshot" in state_dict else _without(state_dict)
        return _iterable(run, loader) if loader._dataset_kind == _DatasetKind.Iterable else _map(run, loader)
    except StateError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise StateError(f"the state dict looks like torchdata's and is not: {one_line(e)}") from e


def _without(d: JsonObject) -> _Run:
    return _Run(0, d, int(d["_num_yielded"]), 0, [d], 0, bool(d["_iterator_finished"]))


def _with_workers(d: JsonObject) -> _Run:
    snapshot = d["_snapshot"]
    workers = int(snapshot["_main_snapshot"]["_num_workers"])
    states = [snapshot["_worker_snapshots"][f"worker_{i}"] for i in range(workers)]
    turn = (int(snapshot["_last_yielded_worker_id"]) + 1) % workers
    step, since = int(snapshot["_snapshot_step"]), int(d["_steps_since_snapshot"])
    return _Run(workers, snapshot["_main_snapshot"], step, since, states, turn, bool(d["_iterator_finished"]))


# -- the two kinds of datasets


def _map(run: _Run, loader: LoaderLike) -> Converted:
    parts: tuple[Part, ...] = ()
    skip = 0
    if any(one["dataset_state"] is not None for one in run.of_workers):
        parts = tuple(Part(0, 0, _object_state(one)) for one in run.of_workers)
        skip = run.since  # which moved the datasets' states, too
    next_, size = run.done - skip, _batch_size(loader)
    order = _order(run, loader, next_, size)
    samples = next_ * (size or 1)
    return Converted(_state(run, loader, next=next_, samples=samples, parts=parts, batch_size=size, **order), skip)


def _iterable(run: _Run, loader: LoaderLike) -> Converted:
    states = [_object_state(one) for one in run.of_workers]
    size = _batch_size(loader)
    order: dict[str, Any] = {"sampler": "endless", "batch_size": size}
    if not any(state["dataset"] is not None or state["iterator"] is not None for state in states):
        again = tuple(Part(0) for _ in states)  # it is read again from the beginning
        order["sampler"] = order["sampler"] if run.workers else REPLAYED
        return Converted(_state(run, loader, next=0, samples=0, parts=again, **order), run.done)
    n = len(states)
    counts = [run.step // n + (i < run.step % n) for i in range(n)]  # if none has ended; only for seeds
    parts = tuple(Part(count, count, state) for count, state in zip(counts, states, strict=True))
    samples = run.step * (size or 1)
    return Converted(_state(run, loader, next=run.step, samples=samples, parts=parts, **order), run.since)


def _object_state(d: JsonObject) -> ObjectState:
    fetcher = d["fetcher_state"] or {}
    return {
        "dataset": d["dataset_state"],
        "iterator": fetcher.get("dataset_iter_state"),
        "ended": bool(fetcher.get("fetcher_ended", False)),
    }


def _state(run: _Run, loader: LoaderLike, **more: Any) -> State:
    base_seed = run.main.get("_base_seed")
    if base_seed is None:
        with preserved(loader.generator):
            base_seed = int(torch.empty((), dtype=torch.int64).random_())
    of_order = {"length": -1, "sampler_rng": {}, "sampler_state": None, "world": None, "generator": None}
    return State(
        **{
            **of_order,
            "kind": "iterable" if loader._dataset_kind == _DatasetKind.Iterable else "map",
            "epoch": 0,
            "ahead": (),
            "finished": run.finished,
            "lives_on": not run.workers or loader.persistent_workers,
            "workers": run.workers,
            "task_seeds": False,
            "base_seed": int(base_seed),
            "shared_seed": run.main["_shared_seed"],
            "torch_rng": None,
            "turn": run.turn if more["next"] else 0,
            "rank": 0,
            "ranks": 0,
            "division": None,
            **more,
        }
    )


# -- the order


def _batch_size(loader: LoaderLike) -> int | None:
    sampler = loader._index_sampler
    return int(sampler.batch_size) if type(sampler) is BatchSampler else None


def _order(run: _Run, loader: LoaderLike, next_: int, size: int | None) -> dict[str, Any]:
    """The entries of ``State`` that say in which order samples come."""
    of_iterator = run.main["_sampler_iter_state"]
    of_sampler = run.main["_index_sampler_state"]
    sampler = loader._index_sampler
    if size is not None:
        sampler = sampler.sampler
        _check_batch_size(run, of_iterator, loader, size)
        inside = of_iterator or {}
        of_iterator, of_sampler = inside.get("sampler_iter_state"), inside.get("sampler_state")
    if type(sampler) is SequentialSampler:
        return {"sampler": "SequentialSampler"}
    if type(sampler) is RandomSampler:
        return _random_order(sampler, of_iterator, loader)
    more: dict[str, Any] = {}
    if isinstance(sampler, DistributedSampler):
        more["world"] = 0, sampler.num_replicas, int(sampler.epoch)
    if of_iterator is None and of_sampler is None:
        return {"sampler": "distributed" if more else REPLAYED, **more}
    given = run.step
    if given > next_:
        raise StateError("torchdata's state is of a sampler that is ahead of its batches")
    state = {"given": given, "sampler": of_sampler, "iterator": of_iterator, "ended": False}
    return {"sampler": "stateful", "sampler_state": state, **more}


def _check_batch_size(run: _Run, of_iterator: ObjectState, loader: LoaderLike, size: int) -> None:
    yielded = (of_iterator or {}).get("samples_yielded")
    if yielded is not None and yielded not in (run.step * size, len(loader.sampler)):
        raise StateError(
            f"torchdata's state is of {yielded} samples in {run.step} batches: a batch size other than {size}"
        )


def _random_order(sampler: RandomSampler, of_iterator: ObjectState, loader: LoaderLike) -> dict[str, Any]:
    if sampler.replacement or of_iterator is None:
        raise StateError(
            "torchdata's state does not have the random order of this loader: it is another sampler's than shuffle=True"
        )
    raw = of_iterator["generator"]
    found = {"sampler": FOREIGN, "length": len(sampler.data_source), "sampler_rng": {"generator": _text(raw)}}
    if loader.generator is not None:  # later epochs are drawn from where it was after this one's order and seed
        after = torch.Generator()
        after.set_state(raw)
        for _ in range(-(-sampler.num_samples // len(sampler.data_source))):
            torch.randperm(len(sampler.data_source), generator=after)
        torch.empty((), dtype=torch.int64).random_(generator=after)
        found["generator"] = _text(after.get_state())
    return found


def _text(state: torch.Tensor) -> str:
    return to_text(state.numpy().tobytes())
