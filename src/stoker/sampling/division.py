"""Divides the rest of a ``DistributedSampler``'s epoch among a new number of ranks.

The order of an epoch is a function of the sampler's seed and epoch, whatever the number of ranks. When all ranks are at
the same batch, together they have taken the beginning of this order. The rest is dealt as torch deals a whole epoch:
its index *i* to rank *i* mod n. So it is padded with fewer than n of its own first indices, or, with ``drop_last``,
fewer than n are dropped.
"""

from __future__ import annotations

import copy

from torch.utils.data.distributed import DistributedSampler

from ..core.errors import StateError
from ..core.random_state import preserved
from ..core.types import Index


def share_of_rest(sampler: DistributedSampler[Index], taken: int) -> list[Index]:
    """Returns the rank's share of the rest of an epoch, after all ranks together have taken ``taken`` indices. Raises
    StateError if the sampler's class divides an epoch differently from torch's."""
    generator = getattr(sampler, "generator", None)
    whole = copy.copy(sampler)
    whole.num_replicas = 1
    whole.rank = 0
    whole.num_samples = whole.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    with preserved(generator):
        own = None if type(sampler).__iter__ is DistributedSampler.__iter__ else list(copy.copy(sampler))
    order = list(whole)
    if own is not None and own != _deal(order, sampler):
        raise StateError(
            f"{type(sampler).__name__} divides an epoch among ranks in its own way, so resuming needs the number of "
            f"ranks that saved the state dict; now there are {sampler.num_replicas}"
        )
    return _deal(order[taken:], sampler)


def _deal(indices: list[Index], sampler: DistributedSampler[Index]) -> list[Index]:
    """Returns one rank's share, dealt as in ``DistributedSampler.__iter__``."""
    ranks = sampler.num_replicas
    if sampler.drop_last:
        indices = indices[: len(indices) // ranks * ranks]
    elif indices:
        padding = -len(indices) % ranks
        indices = indices + (indices * (padding // len(indices) + 1))[:padding]
    return indices[sampler.rank :: ranks]
