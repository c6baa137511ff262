"""Joins the states of all ranks in one state dict, and picks what each rank resumes, for any number of ranks.

Which states a rank needs::

    DistributedSampler            any rank's: together, the ranks have taken the beginning of one order
    iterable, same rank count     its own
    iterable, other rank count    all: each part is where its rank left it. Parts are redistributed and read to the end
    any other sampler             its own, with the same rank count
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..core.errors import StateError
from ..core.types import JsonObject
from ..core.warn import warn_user
from .state import VERSION, State, read_packed, write_packed

ALL_RANKS = "all_ranks"


def join(states: Sequence[JsonObject]) -> JsonObject:
    return {"stoker": VERSION, ALL_RANKS: write_packed(list(states))}


def read(state_dict: object, rank: int, ranks: int) -> State:
    """Returns the state that this rank resumes, from one rank's state dict or from that of all ranks (``join``). Raises
    StateError if it is not a state dict, or lacks what this number of ranks needs."""
    if not isinstance(state_dict, dict) or ALL_RANKS not in state_dict:
        return _of_one(State.from_dict(state_dict), rank, ranks)
    found = read_packed(state_dict[ALL_RANKS])
    if not isinstance(found, list) or not found:
        raise StateError(f"{ALL_RANKS} in a state dict must be a list with each rank's state")
    states = [State.from_dict(one) for one in found]
    if len({s.kind for s in states}) > 1 or any(
        s.kind == "iterable" and (s.rank, s.ranks) != (i, len(states)) for i, s in enumerate(states)
    ):
        raise StateError(f"the {len(states)} states in {ALL_RANKS} do not come from the ranks of a single run")
    return _of_all(states, rank, ranks)


def _of_all(states: Sequence[State], rank: int, ranks: int) -> State:
    over = all(s.finished for s in states)  # else a rank that has reached the epoch's end waits there for the others
    states = [replace(s, finished=over) for s in states]
    if len(states) == ranks:
        return states[rank]
    if states[0].kind == "iterable":
        return _deal(states, rank, ranks)
    places = {(s.next, s.samples) for s in states}
    if len(places) > 1:
        batches = [s.next for s in states]
        raise StateError(
            f"the ranks were not at the same batch when they were saved (they had {min(batches)} to {max(batches)}), "
            f"so only {len(states)} ranks can resume, not {ranks}"
        )
    return states[0]


def _of_one(s: State, rank: int, ranks: int) -> State:
    if s.kind == "map" or not s.ranks or (s.rank, s.ranks) == (rank, ranks):
        return s
    if s.ranks == 1 or s.finished:
        return _deal([s], rank, ranks)
    if s.ranks != ranks:
        raise StateError(
            f"the state dict was saved by rank {s.rank} of {s.ranks} with an iterable dataset, and there are {ranks} "
            "ranks now. Resuming needs the states of all ranks: save them with stoker.AllRanks"
        )
    if s.dealt_anew or any(part.state is not None for part in s.parts):
        raise StateError(
            f"the state dict was saved by rank {s.rank} with an iterable dataset, but this is rank {rank}. Load each "
            "rank's own state, or save all of them with stoker.AllRanks"
        )
    warn_user(
        f"Rank {rank} loaded the state dict of rank {s.rank} with an iterable dataset. That is correct only if both "
        "had delivered the same number of batches and had the same seed. stoker.AllRanks saves every rank's own "
        "state."
    )
    mine = tuple(replace(part, shard=i * ranks + rank) for i, part in enumerate(s.parts))
    return replace(s, rank=rank, parts=mine)


def _deal(states: Sequence[State], rank: int, ranks: int) -> State:
    """Deals the parts of an iterable dataset to a different number of ranks: part *i* to rank *i* mod n."""
    own = replace(states[rank % len(states)], rank=rank, ranks=ranks, ahead=(), turn=0)
    if all(s.finished for s in states):
        return replace(own, parts=(), workers=0, lives_on=False)  # the next epoch is divided as in a new run
    parts = {part.shard: part for s in states for part in s.parts}
    division = own.division or (1, 0)
    count = division[0] * max(1, division[1])
    if any(s.division != own.division for s in states) or len(parts) != count or set(parts) != set(range(count)):
        raise StateError(f"the state dict has only {len(parts)} of the {count} parts of the iterable dataset")
    mine = tuple(parts[i] for i in range(rank, count, ranks))
    batches = sum(part.count for part in mine)
    seed = int(mine[0].base_seed or 0) if mine else own.base_seed  # the parts may again be those of one rank
    return replace(own, parts=mine, workers=len(mine), next=batches, samples=0, finished=False, base_seed=seed)
