"""``cold_cache``: the first epoch reads from storage, the others from memory."""

from __future__ import annotations

from .later import FEW
from .loader_stats import Finding, LoaderStats

SLOWER = 2.0
LEAST = 0.1  # of the loop
SLEPT = 0.25  # of what the first epoch lost, in the workers; what else it lost, it lost to want of a core
BYTES = 16 << 20  # read from storage, at least


def check(case: LoaderStats) -> Finding | None:
    epochs = [e for e in case.loader.get("by_epoch", []) if e[0] >= FEW]
    stored = int((case.loader.get("kernel") or {}).get("stored", 0))
    if len(epochs) < 2 or stored < BYTES or (case.loader.get("cache") or {}).get("filled"):
        return None  # a cache that stoker filled makes the first epoch longer, whatever was read
    waits = [(wait - first) / batches for batches, wait, _, first, *_ in epochs]
    later = sum(waits[1:]) / len(waits[1:])
    if waits[0] < SLOWER * max(later, 1e-6):
        return None
    lost = (waits[0] - later) * epochs[0][0]
    share = lost / case.total if case.total else 0.0
    # What a first epoch loses may have other causes. Its workers sleep while a disk reads.
    if share * case.weight < LEAST or _slept(case) < SLEPT * lost:
        return None
    return Finding(
        "cold_cache",
        share,
        {"first_epoch_wait_ms": waits[0] * 1e3, "later_wait_ms": later * 1e3, "stored_bytes": stored},
        "only the first epoch waits, for storage: nothing to do where there are many; else read the files once before",
        1 / (1 - share),
    )


def _slept(case: LoaderStats) -> float:
    """Seconds of their tasks in which the workers neither computed nor wanted a core."""
    worker = case.loader["stages"].get("worker", {})
    took = (case.service or 0.0) * int(worker.get("tasks", 0))
    delay = float((case.loader.get("kernel") or {}).get("delay_ns", 0)) / 1e9
    return max(case.waits * took, took - float(worker.get("cpu_s", 0.0)) - delay)
