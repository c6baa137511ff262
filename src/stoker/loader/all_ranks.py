"""``AllRanks``: the positions of all ranks' loaders in one state dict."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from ..core.errors import StateError, UsageError
from ..core.ranks import rank_and_ranks
from ..core.types import JsonObject
from ..sampling.rank_states import join
from ..sampling.stateful import is_stateful


class _Stateful(Protocol):
    def state_dict(self) -> JsonObject: ...

    def load_state_dict(self, state_dict: JsonObject, /) -> None: ...


class AllRanks:
    """Wraps a loader so that its state dict holds every rank's position; a run can then resume on more or fewer ranks.

    For ``torch.distributed.checkpoint``, as it is, and for a file that rank 0 writes. Iterable datasets need it; with a
    ``DistributedSampler``, any rank's own state dict is sufficient.

    Args:
        loader: a ``stoker.DataLoader``.

    Raises:
        UsageError: the loader has no ``state_dict()``.

    Example:
        >>> from stoker import DataLoader
        >>> loader = DataLoader(range(8), batch_size=2)
        >>> saved = AllRanks(loader).state_dict()  # each rank calls it
        >>> AllRanks(DataLoader(range(8), batch_size=2)).load_state_dict(saved)
    """

    def __init__(self, loader: _Stateful) -> None:
        if not is_stateful(loader):
            raise UsageError(f"AllRanks takes a stoker.DataLoader; a {type(loader).__name__} has no state_dict()")
        self._loader = loader

    def state_dict(self) -> JsonObject:
        """Returns the state dicts of all ranks as one. Every rank must call this after the same batch.

        Raises:
            StateError: there are several ranks and no process group.
        """
        own, (_, ranks) = self._loader.state_dict(), rank_and_ranks()
        if ranks == 1:
            return join([own])
        if not (dist.is_available() and dist.is_initialized()):
            raise StateError(
                "AllRanks communicates with the other ranks: call torch.distributed.init_process_group() first"
            )
        found: list[JsonObject] = [{}] * ranks
        dist.all_gather_object(found, own)
        return join(found)

    def load_state_dict(self, state_dict: JsonObject) -> None:
        """Same as the loader's own ``load_state_dict``, which also accepts this state dict."""
        self._loader.load_state_dict(state_dict)
