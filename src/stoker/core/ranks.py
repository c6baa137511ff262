"""Which rank of a distributed run this process is."""

from __future__ import annotations

import os
import sys


def rank_and_ranks() -> tuple[int, int]:
    """This process' rank and the number of ranks; 0 and 1 without a distributed run. Both come from the process group,
    or, before there is one, from what the launcher put into the environment (``RANK`` and ``WORLD_SIZE``)."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    rank, ranks = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks):
        return int(rank), int(ranks)
    return 0, 1
