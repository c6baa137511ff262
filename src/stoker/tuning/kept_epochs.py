"""Decides under ``stoker run --apply`` whether a loader's workers stay for its next epoch (``loader.kept_workers``).

They may stay where a worker that is started anew would be the same: samples neither change nor print anything, nothing
of the script's that they are made from has changed since the workers were started, and ``worker_init_fn`` only seeds.
What the script changes while an epoch runs, workers do not see, with torch as with stoker.
"""

from __future__ import annotations

import csv
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch.multiprocessing
from torch.utils.data import IterDataPipe, MapDataPipe

from ..core import resources
from ..core.elsewhere import elsewhere
from ..core.handles import held
from ..core.marked_code import original
from ..core.processes import method_of
from ..core.random_state import RandomState
from ..core.types import LoaderLike
from ..loader.loader_state import state_of
from ..sampling.generators import find_generators
from ..sampling.stateful import is_stateful
from ..sampling.worker_init import only_seeds
from ..staging.dataset import Staged
from ..staging.inputs import functions_of
from ..staging.trial import TrialResult
from ..staging.users_code import names_in
from .applied_loader import applied_to
from .given_workers import ScriptChanges, own_sampler, written_by_collate

START_S = 0.02  # cost of starting a worker: comparing must take less
# Workers are started again after this time: in longer epochs that costs little, and a worker that was just started sees
# a change that no comparison finds, when it makes cached samples again.
KEPT_S = 2.0
MUTABLE = (list, dict, set, bytearray, deque)
BY_TEXT = frozenset({"eval", "exec", "import_module", "__import__"})


def _same_as_new(loader: LoaderLike, found: TrialResult, staged: Staged) -> Callable[[LoaderLike], bool] | None:
    """Returns a function that tells whether workers that are started now are, later, the same as new ones; None if that
    cannot be known, or takes too long to find."""
    began = time.thread_time()
    functions = functions_of(
        loader.dataset, [fn for fn in (loader.collate_fn, loader.worker_init_fn) if fn is not None]
    )
    if any(not BY_TEXT.isdisjoint(names_in(original(fn.__code__))[1]) for fn in functions):
        return None  # what it reads is unknown
    if any(
        isinstance(x, MUTABLE)
        for fn in functions
        for x in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
    ):
        return None  # ``def collate(samples, seen=[])``: they hold what earlier calls have put there
    changes, generators = ScriptChanges(loader, found, staged, (loader.worker_init_fn,)), _generators(loader)
    settings = _settings()
    if not changes.is_complete or time.thread_time() - began > START_S * int(loader.num_workers):
        return None
    return lambda loader: not changes() and (_generators(loader), _settings()) == (generators, settings)


def _settings() -> tuple[object, ...]:
    """What belongs to a process, and a worker has from its start: also the random part of a sample may read it."""
    limits = csv.field_size_limit(), getattr(sys, "get_int_max_str_digits", int)()
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    umask = next((line for line in status.splitlines() if line.startswith("Umask")), "")
    return dict(os.environ), time.timezone, time.altzone, limits, umask


def _generators(loader: LoaderLike) -> RandomState:
    return RandomState(find_generators(loader.dataset, loader.collate_fn), ())


def decide(loader: LoaderLike, found: TrialResult | None, staged: Staged | None) -> None:
    """Tells the engine whether workers stay for the coming epoch; ends the last ones if a new one would differ."""
    state, applied = state_of(loader), applied_to(loader)
    never = found is None or staged is None or not staged.usable or why_never(loader, found)
    is_over = bool(never) or time.monotonic() >= applied.kept_until
    kept = state.take_kept(not is_over and applied.same_as_new is not None and applied.same_as_new(loader))
    state.kept, state.keeps_workers = kept, 0.0
    if never or found is None or staged is None:
        return
    if kept is None:
        applied.same_as_new, state.kept_since = _same_as_new(loader, found, staged), object()
        applied.kept_until = 0.0 if applied.same_as_new is None else time.monotonic() + KEPT_S
    state.keeps_workers = applied.kept_until


def why_never(loader: LoaderLike, found: TrialResult) -> str:
    """Why a worker that has made samples differs from a new one; "" if it does not, or if there are none."""
    if found.changes or found.writes_elsewhere or found.assigns:
        return "loading a sample changes something in its process"
    written = written_by_collate(loader)
    if written:
        return f"the loader's collate_fn changes {written}"
    if not int(loader.num_workers) or state_of(loader).own_workers == 0:
        return "the script asked for no workers"
    sampler = own_sampler(loader)
    if sampler:
        return f"{sampler} is the script's own, and may change something before workers start"
    if state_of(loader).metrics.worker_pss:
        each = max(state_of(loader).metrics.worker_pss.values())
        if resources.workers_bound(each)[0] < int(loader.num_workers):
            return "memory is short"
    return found.only_in_workers or why_not(loader)


def why_not(loader: LoaderLike) -> str:
    """Why each epoch needs workers of its own; "" if it does not. ``worker_init_fn`` may do anything to a worker's
    process, unless it only seeds. Open files belong to each worker's own copy of the dataset."""
    dataset = loader.dataset
    if loader.persistent_workers or loader.timeout:
        return "persistent_workers or timeout is set"
    if loader.worker_init_fn is not None and not only_seeds(loader.worker_init_fn):
        return "worker_init_fn may do more than seed random generators"
    if elsewhere(loader.__dict__.get("worker_method")) is not None:
        return "cluster nodes also load batches"
    if loader.multiprocessing_context is not None or hasattr(loader, "state_dict"):
        return "the loader has a multiprocessing_context or a state"
    if method_of(torch.multiprocessing) != "fork":
        return "workers are not forked"
    if is_stateful(dataset) or isinstance(dataset, (IterDataPipe, MapDataPipe)):
        return "the dataset has a state"
    return held(dataset)
