"""What ``--apply`` knows of one loader between its epochs."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.types import JsonObject, LoaderLike
from ..loader.loader_state import state_of
from .cached_epochs import CachedEpochs


@dataclass
class Draws:
    """Whether making batches in the script's process has moved a random generator."""

    batches: int = 0  # that were looked at
    moved: bool = False


@dataclass
class AppliedLoader:
    entry: JsonObject | None = None  # what the report says of it; None: nothing is decided
    is_undecided: bool = False  # whether it gets workers is decided again
    draws: Draws = field(default_factory=Draws)
    has_cache_in_workers: bool = False  # workers that stay, of a class of their own, were started with the cache
    epochs: CachedEpochs | None = None  # who makes the next one
    only_in_workers: str | None = None  # why the script's process makes no batches; None: not asked yet


def applied_to(loader: LoaderLike) -> AppliedLoader:
    """The record of a loader."""
    state = state_of(loader)
    if not isinstance(state.applied, AppliedLoader):
        state.applied = AppliedLoader()
    return state.applied
