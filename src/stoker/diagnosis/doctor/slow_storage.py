"""``slow_storage``: workers wait, cores idle: for a disk, a network, a lock of somebody else's."""

from __future__ import annotations

from . import memory_pressure
from .loader_stats import Finding, LoaderStats
from .model import without

LEAST = 0.3  # of the time in which the worker had a core, or wanted none
BARE = 0.5  # no less than this part of a task's time counts as such: the little that is left would say nothing
COMPUTES = 0.5  # cores


def check(case: LoaderStats) -> Finding | None:
    if not case.bottleneck or case.loader["settings"].get("worker_method") == "thread":
        return None  # a thread that waits may wait for the interpreter lock
    if case.pooled and case.used >= COMPUTES:
        return None  # and so may one of the dataset's own
    parts = {**case.looks("fetch", ran=False), **case.looks("decode", ran=False)}
    part = sum(parts.values())
    # What was read, and dropped for want of memory, is read again: that is not the storage's.
    if not parts or part - memory_pressure.stalled(case) < LEAST * max(BARE, 1 - case.coreless):
        return None
    name = max(parts, key=lambda k: parts[k])
    kernel = case.loader.get("kernel", {})
    evidence = {
        "line": name,
        "share_of_a_task": part,
        "looks": case.loader["looks"],
        "stored_bytes": kernel.get("stored", 0),
        "major_faults": kernel.get("faults", 0),
    }
    return Finding(
        "slow_storage",
        case.share * part * case.clear,
        evidence,
        f"workers wait {part:.0%} of a task's time at {name}: more workers wait at the same time, "
        "a local copy waits less",
        without(case, part),
    )
