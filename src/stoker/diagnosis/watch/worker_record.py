"""What a fetching process records of its tasks beyond their sums: how long each took, stacks, the kernel's counts.

::

    worker: WorkerRecord.done() -> write(): JSON into a row of shared memory -> read(): the watching process
            -> merge(): the records of several processes as one

A record holds what its process has seen from its start on; the watching process keeps the last one of each.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import CodeType

from ...core import resources
from ...core.histogram import SLOW, Histogram
from ...core.stacks import known_getters, known_transforms
from ...core.types import JsonObject
from .stack_sampler import StackSampler

ROW_BYTES = 8192
KEYS = {"pid", "pss", "bins", "stacks", "slow", "kernel", "seconds", "own"}
MEMORY_S = 2.0  # between two readings of a worker's memory, which take milliseconds each
FIRST_MEMORY_S = 0.05  # before the first: where each epoch starts workers, their first batches would wait for it
MAX_POINTS = 24  # of them; after that every other one is dropped
SERIES = 8  # workers whose memory is kept, those that grew most
WRITE_S = 0.2  # between two writes of a process, which may end at any moment
SHORT_S = 1e-3  # a task in the main process that is not sampled: that would cost the script more than it says
TOP = 16  # lines of code that are kept
ENOUGH = 16  # tasks before one is called slow
EMPTY: JsonObject = {"bins": {}, "stacks": [], "slow": {}, "kernel": {}, "seconds": 0.0, "own": []}


def code_of(collate: object) -> CodeType | None:
    """The code of a collate function in Python: a function, a ``functools.partial`` of one, an object with
    ``__call__``."""
    while isinstance(collate, functools.partial):
        collate = collate.func
    if callable(collate) and not hasattr(collate, "__code__"):
        collate = type(collate).__call__
    code = getattr(collate, "__code__", None)
    return code if isinstance(code, CodeType) else None


class WorkerRecord:
    """The record of one fetching thread. ``dataset``: whose transforms and samples are called by name."""

    def __init__(self, row: memoryview, dataset: object, collate: object) -> None:
        in_worker = multiprocessing.parent_process() is not None
        self._row = row  # ``ROW_BYTES`` of shared memory
        self._times = Histogram()
        self._took: list[float] = []  # not in the histogram yet
        self._tasks = 0
        self._began = time.monotonic()
        self._start = kernel()
        self._written = 0.0
        self._own: list[list[float]] = []  # seconds and bytes of private memory
        self._pss = 0  # bytes, shared pages divided by those who share them
        self._next_note = self._began + FIRST_MEMORY_S if in_worker else math.inf  # when memory is read
        self.sampler = StackSampler(threading.get_ident(), threading.get_native_id(), alone=in_worker)
        self.sampler.min_task_s = 0.0 if in_worker else SHORT_S
        self.sampler.collate = code_of(collate)
        self.sampler.transforms = known_transforms(dataset)
        self.sampler.getters = known_getters(dataset)

    def done(self, took: float) -> None:
        """A task is over, after so many seconds."""
        before, self._tasks = self._tasks, self._tasks + 1
        self._took.append(took)
        now = time.monotonic()
        if before.bit_length() != self._tasks.bit_length() or now - self._written > WRITE_S:
            self._written = now
            self.write()
            if self._tasks >= ENOUGH:
                self.sampler.slow_s = SLOW * self._times.median()

    def write(self) -> None:
        """Writes the record. A reader finds all of it or nothing."""
        self._times.add(self._took)
        self._took.clear()
        self._note_memory()
        top = sorted(self.sampler.counts.items(), key=lambda kv: -sum(kv[1]))[:TOP]
        now = kernel()
        now["cpu_ns"] -= int(self.sampler.cpu_s * 1e9)  # the sampling thread is not the dataset's
        text = json.dumps(
            {
                "pid": os.getpid(),
                "pss": self._pss,
                "bins": self._times.bins,
                "stacks": [[*key, *count] for key, count in top],
                "slow": dict(sorted(self.sampler.slow.items(), key=lambda kv: -kv[1])[:8]),
                "kernel": {k: now[k] - self._start[k] for k in now},
                "seconds": time.monotonic() - self._began,
                "own": self._own,
            },
            separators=(",", ":"),
        ).encode()
        if len(text) <= ROW_BYTES - 4:
            self._row[:4] = bytes(4)
            self._row[4 : 4 + len(text)] = text
            self._row[:4] = len(text).to_bytes(4, "little")

    def _note_memory(self) -> None:
        """Notes this worker's memory, now and then."""
        now = time.monotonic()
        if now < self._next_note:
            return
        self._next_note = now + MEMORY_S
        self._pss, private = resources.pss_and_private()
        self._own.append([round(now - self._began, 1), private])
        if len(self._own) > MAX_POINTS:
            del self._own[1:-1:2]


def read(row: memoryview) -> JsonObject | None:
    """What ``write`` left there; None for nothing, or for half of something."""
    length = int.from_bytes(row[:4], "little")
    if not 0 < length <= ROW_BYTES - 4:
        return None
    try:
        found = json.loads(bytes(row[4 : 4 + length]))
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.keys() >= KEYS else None


def merge(records: Iterable[JsonObject]) -> JsonObject:
    """The records of several processes as one."""
    times = Histogram()
    stacks: dict[tuple[str, str, str], list[int]] = {}
    slow, sums = Counter[str](), Counter[str]()
    seconds = 0.0
    own: list[list[list[float]]] = []
    for record in records:
        # A record is of one process, or of several that were merged before.
        own += record["own"] if "pid" not in record else [record["own"]] if record["own"] else []
        times.merge({int(number): n for number, n in record["bins"].items()})
        for kind, name, line, ran, waited in record["stacks"]:
            count = stacks.setdefault((kind, name, line), [0, 0])
            count[0] += ran
            count[1] += waited
        slow.update(record["slow"])
        sums.update(record["kernel"])
        seconds += record["seconds"]
    order = sorted(stacks.items(), key=lambda kv: -sum(kv[1]))
    return {
        "bins": times.bins,
        "stacks": [[*key, *count] for key, count in order],
        "slow": dict(slow),
        "kernel": dict(sums),
        "seconds": seconds,
        "own": sorted(own, key=lambda series: series[0][1] - series[-1][1])[:SERIES],
    }


def minus(record: JsonObject, before: JsonObject) -> JsonObject | None:
    """A process' record without an earlier one of it; None where nothing is new."""
    if record["seconds"] <= before["seconds"]:
        return None
    old = {tuple(key): count for *key, ran, waited in before["stacks"] for count in [(ran, waited)]}
    stacks = []
    for *key, ran, waited in record["stacks"]:
        was = old.get(tuple(key), (0, 0))
        stacks.append([*key, max(0, ran - was[0]), max(0, waited - was[1])])
    counts = {
        name: {k: n - before[name].get(k, 0) for k, n in record[name].items() if n > before[name].get(k, 0)}
        for name in ("bins", "slow")
    }
    return {
        **record,
        **counts,
        "kernel": {k: n - before["kernel"].get(k, 0) for k, n in record["kernel"].items()},
        "stacks": [row for row in stacks if row[3] or row[4]],
        "seconds": record["seconds"] - before["seconds"],
    }


def kernel() -> dict[str, int]:
    """What the kernel counts for this process (proc(5)): nanoseconds that its main thread waited for a core, bytes read
    from storage; and nanoseconds of CPU of all threads, and of that in the kernel."""
    out = {"delay_ns": 0, "stored": 0, "system_ns": 0, "cpu_ns": time.process_time_ns()}
    with contextlib.suppress(OSError, ValueError, IndexError):
        out["delay_ns"] = int(Path("/proc/self/schedstat").read_text().split()[1])
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        out["system_ns"] = int(fields[12]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    with contextlib.suppress(OSError, ValueError):
        io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        out["stored"] = int(io["read_bytes"])
    return out
