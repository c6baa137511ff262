"""Decides under ``stoker run --apply`` how many processes fill a loader's cache beside its own workers."""

from __future__ import annotations

import functools
import weakref

import torch.multiprocessing

from ..core.handles import held
from ..core.options import AutoWorkers
from ..core.processes import method_of
from ..core.types import LoaderLike
from ..loader.auto.limits import first_guess
from ..sampling.worker_init import only_seeds
from ..staging.fill_ahead import FillAhead
from ..workers.can_start import why_not
from .managed_dataset import ManagedDataset


def helpers_of(loader: LoaderLike, known: ManagedDataset) -> FillAhead | None:
    """Returns the helpers of a loader's coming epoch. They start only once there is a cache.

    None: there will be no cache, or the loader's workers can be as many as there are cores. Also for a loader without
    workers: the script's process makes samples in turn, may change files meanwhile, and has more native threads."""
    has_cache = known.staged is not None or known.trial is not None
    if not has_cache or known.is_single_pass or not loader._auto_collation or not int(loader.num_workers):
        return None
    if isinstance(loader.num_workers, AutoWorkers):
        return None
    return FillAhead(loader.dataset, lambda: known.staged, functools.partial(_count, weakref.ref(loader), known))


def _count(made: weakref.ref[LoaderLike], known: ManagedDataset) -> int:
    """One process for each core that has no worker."""
    loader = made()
    if loader is None or known.staged_for(loader) is None:
        return 0
    init = loader.worker_init_fn
    if why_not(loader, threads=True) or held(loader.dataset) or (init is not None and not only_seeds(init)):
        return 0
    if method_of(loader.multiprocessing_context or torch.multiprocessing) != "fork":
        return 0  # a process that is started anew has another dataset
    return max(0, first_guess(loader)[0] - int(loader.num_workers))
