"""``stoker run --apply``: measured settings behind loaders that were written without stoker in mind.

A loader keeps its own settings where measuring does not promise more, and wherever a sample cannot be loaded in a
worker: a script must not break because somebody wanted it faster.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from .. import engine
from ..options import AutoWorkers, Measured
from .probe import measure


def decide(loader: Any, measured: Measured) -> tuple[int, str]:
    """The worker count to use for a loader with settings of its own, and why."""
    own = int(loader.num_workers)
    if measured.failed or not measured.rates:
        return own, f"kept {own}: {measured.reason}"
    best = measured.rates[measured.workers]
    if own == 0 and measured.inline_rate is not None and measured.inline_rate >= best:
        return 0, f"kept 0: one process alone makes {measured.inline_rate:.3g} batches/s, workers {best:.3g}"
    return measured.workers, measured.reason


def attach(module: Any, applied: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    """Puts stoker's engine behind ``module.DataLoader``; each loader is measured when it is first iterated.

    Args:
        module: torch.utils.data.dataloader.
        applied: gets one entry a loader: ``{"from": settings, "to": settings, "reason": words, "measured_s": s}``.
        found: by loader, settings that an observed run asked for. Of these the depth of prefetching is taken, which
            changes no batch; ``persistent_workers`` may, where the dataset changes between epochs.
    """
    done: dict[str, Measured] = {}

    def _get_iterator(loader: Any) -> Any:
        name = loader.__dict__.get("_stoker_name", "?")
        if "_stoker_applied" not in loader.__dict__:
            loader.__dict__["_stoker_applied"] = True
            # "auto" measures for itself; an iterable dataset's shards depend on the count, so that stays.
            if not isinstance(loader.num_workers, AutoWorkers) and loader._dataset_kind == 0 and engine.SUPPORTED:
                if found.get(name, {}).get("staged"):
                    _stage(loader, name)
                with _staged(loader):
                    if name not in done and len(loader.dataset):
                        done[name] = _measure(loader, name, applied)
                if name in done:  # by another loader of the same line, perhaps, that had settings of its own
                    _use(loader, decide(loader, done[name])[0])
                _deepen(loader, found.get(name, {}).get("prefetch_factor"), applied.get(name))
                if "_stoker_staged" in loader.__dict__ and name in applied:
                    applied[name]["from"]["staged"], applied[name]["to"]["staged"] = False, True
        with _staged(loader):
            return engine.get_iterator(loader)

    module.DataLoader._get_iterator = _get_iterator


def _stage(loader: Any, name: str) -> None:
    """Keeps the deterministic part of a loader's dataset in memory, for what its workers see; the script's own view
    of the dataset stays what it is."""
    from ..staging.staged import Staged

    init = getattr(loader.worker_init_fn, "__code__", None)
    if loader.worker_init_fn is not None and (init is None or "dataset" in init.co_names):
        return  # each worker's dataset is another then
    last = _kept.get(name)
    try:
        if last is None or last.dataset is not loader.dataset:
            staged = Staged(loader.dataset)
            # A script that makes its dataset anew for each epoch gets the cache of the last one, if it is the same.
            if last is None or last._key() != staged._key():
                _kept[name] = staged
                sys.stderr.write(f"stoker: {name}: what is the same in every epoch is kept in memory\n")
        loader.__dict__["_stoker_staged"] = _kept[name]
    except Exception as e:  # nothing that somebody wanted faster may break a script
        sys.stderr.write(f"stoker: {name}: nothing is kept: {e}\n")


_kept: dict[str, Any] = {}


@contextlib.contextmanager
def _staged(loader: Any) -> Iterator[None]:
    """The staged dataset in the loader's own one's place, while an iterator is made of it."""
    held = loader.__dict__
    own, staged = held["dataset"], held.get("_stoker_staged")
    if staged is None:
        yield
        return
    held["dataset"] = staged
    try:
        yield
    finally:
        held["dataset"] = own


def _measure(loader: Any, name: str, applied: dict[str, Any]) -> Measured:
    own = int(loader.num_workers)
    began = time.monotonic()
    sys.stderr.write(f"stoker: measuring workers for {name} ... ")
    sys.stderr.flush()
    measured = engine.state_of(loader).measured = measure(loader, engine.budget())
    count, reason = decide(loader, measured)
    sys.stderr.write(f"{count} ({time.monotonic() - began:.1f} s)\n")
    applied[name] = {
        "from": {"num_workers": own},
        "to": {"num_workers": count},
        "reason": reason,
        "measured_s": measured.seconds,
        "rates": {"0": measured.inline_rate, **measured.rates} if measured.inline_rate else dict(measured.rates),
    }
    return measured


def _deepen(loader: Any, depth: Any, entry: dict[str, Any] | None) -> None:
    """Gives a loader with workers a deeper prefetch, and says so in its entry."""
    own = loader.prefetch_factor
    if not isinstance(depth, int) or not int(loader.num_workers) or own is None or depth <= own:
        return
    loader.prefetch_factor = depth
    if entry is not None:
        entry["from"]["prefetch_factor"], entry["to"]["prefetch_factor"] = own, depth


def _use(loader: Any, count: int) -> None:
    """Gives a loader another count. Its own count keeps torch's seeds; another one seeds each task."""
    if count == int(loader.num_workers):
        return
    loader.num_workers = AutoWorkers(count)
    if loader.prefetch_factor is None:
        loader.prefetch_factor = 2
    state = engine.state_of(loader)
    state.measured = state.measured or Measured(count, reason="applied")
