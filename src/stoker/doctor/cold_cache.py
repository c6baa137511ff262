"""``cold_cache``: the first epoch reads from storage, the others from memory."""

from __future__ import annotations

from typing import Any

from . import Case, Finding

SLOWER = 2.0
LEAST = 0.1  # of the loop
FEW = 5  # batches of an epoch
BYTES = 16 << 20  # read from storage, at least


def without(entry: dict[str, Any]) -> dict[str, Any]:
    """The loader as it is in later epochs, for all other rules."""
    epochs = [e for e in entry["by_epoch"] if e[0] >= FEW][1:]
    wait, batches = sum(e[1] - e[3] for e in epochs), sum(e[0] for e in epochs)
    startup = float(entry["stages"].get("startup", {}).get("wait_s", 0.0))
    return {**entry, "wait_s": startup + wait / batches * entry["batches"]}


def check(case: Case) -> Finding | None:
    epochs = [e for e in case.loader.get("by_epoch", []) if e[0] >= FEW]
    stored = int((case.loader.get("kernel") or {}).get("stored", 0))
    if len(epochs) < 2 or stored < BYTES:
        return None
    waits = [(wait - first) / batches for batches, wait, _, first in epochs]
    later = sum(waits[1:]) / len(waits[1:])
    if waits[0] < SLOWER * max(later, 1e-6):
        return None
    lost = (waits[0] - later) * epochs[0][0]
    share = lost / case.total if case.total else 0.0
    if share * case.weight < LEAST:
        return None
    return Finding(
        "cold_cache",
        share,
        {"first_epoch_wait_ms": waits[0] * 1e3, "later_wait_ms": later * 1e3, "stored_bytes": stored},
        "only the first epoch waits, for storage: nothing to do where there are many; else read the files once before",
        1 / (1 - share),
    )
