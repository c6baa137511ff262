"""A loader as it is in its later epochs: without what happens once, such as a cold cache or a cache being filled."""

from __future__ import annotations

import msgspec

from ..report.schema import LoaderReport

MIN_BATCHES = 5  # of an epoch that counts


def filling_epochs(loader: LoaderReport) -> int:
    """The first epochs, in which stoker filled a cache; 0 where it did not, or where no epoch followed them."""
    if not loader.cache.filled:
        return 0
    first = max(1, loader.filled_epochs)
    return first if any(e.batches >= MIN_BATCHES for e in loader.by_epoch[first:]) else 0


def later_epochs(loader: LoaderReport) -> LoaderReport:
    """The loader with waits and steps such as those of its later epochs, for as many batches."""
    first = filling_epochs(loader)
    epochs = loader.by_epoch[first:] if first else [e for e in loader.by_epoch if e.batches >= MIN_BATCHES][1:]
    scale = loader.batches / sum(e.batches for e in epochs)
    wait_s = sum(e.later_wait_s for e in epochs) * scale
    step_s = sum(e.step_s for e in epochs) * scale
    return msgspec.structs.replace(loader, wait_s=loader.stages.startup.wait_s + wait_s, step_s=step_s)
