"""What ``--apply`` knows about one loader between its epochs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.types import JsonObject, LoaderLike
from ..loader.loader_state import state_of
from ..staging.inputs import Inputs
from ..staging.store.memory import Flag
from .cached_epochs import CachedEpochs


@dataclass
class Draws:
    """Whether making batches in the script's process has advanced a random generator."""

    batches: int = 0  # batches observed
    moved: bool = False
    made_from: Inputs | None = None  # what batches were made from when that began


@dataclass
class AppliedLoader:
    entry: JsonObject | None = None  # the loader's entry in the report; None: nothing is decided yet
    is_undecided: bool = False  # whether it gets workers must be decided again
    draws: Draws = field(default_factory=Draws)
    given_for: Callable[[], str] | None = None  # describes changes since a loader was given workers; "" for none
    drew: Flag | None = None  # raised by these workers when making a batch drew random numbers
    was_taken_back: bool = False  # the script has changed its dataset since
    has_cache_in_workers: bool = False  # persistent workers, of its class's own iterators, have started with it
    epochs: CachedEpochs | None = (
        None  # decides who makes the next epoch of a loader that the script made without workers
    )
    # whether workers that stay for the next epoch are the same as new ones, and until when they may stay; None: none do
    same_as_new: Callable[[LoaderLike], bool] | None = None
    kept_until: float = 0.0


def applied_to(loader: LoaderLike) -> AppliedLoader:
    """Returns the record of a loader; creates it if needed."""
    state = state_of(loader)
    if not isinstance(state.applied, AppliedLoader):
        state.applied = AppliedLoader()
    return state.applied
