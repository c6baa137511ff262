"""What a fetching process records about its tasks beyond their sums: single durations, stacks, kernel counters.

::

    worker: WorkerRecord.done() -> write(): JSON into a row of shared memory -> read(): the watching process
            -> merge(): the records of several processes as one

A record covers all that its process has seen so far; the watching process keeps the latest record of each.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import multiprocessing
import os
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
MEMORY_S = 2.0  # seconds between two readings of a worker's memory, which take milliseconds each
FIRST_MEMORY_S = 0.05  # delay of the first reading, which would hold up first batches if each epoch starts workers
MAX_POINTS = 24  # readings kept; beyond that every other one is dropped
SERIES = 8  # most workers whose readings are kept: those that grew most
WRITE_S = 0.2  # seconds between two writes; short, because a process may end at any moment
SHORT_S = 1e-3  # shorter tasks in the main process are not sampled: it would cost the script more than it tells
TOP = 16  # lines of code that are kept
ENOUGH = 16  # tasks before one can be called slow
EMPTY: JsonObject = {"bins": {}, "stacks": [], "slow": {}, "kernel": {}, "seconds": 0.0, "own": []}


def code_of(collate: object) -> CodeType | None:
    """Returns the code object of a collate function, which may also be a ``functools.partial`` or an object with
    ``__call__``. None if it is not written in Python."""
    while isinstance(collate, functools.partial):
        collate = collate.func
    if callable(collate) and not hasattr(collate, "__code__"):
        collate = type(collate).__call__
    code = getattr(collate, "__code__", None)
    return code if isinstance(code, CodeType) else None


class WorkerRecord:
    """The record of one fetching thread. Transforms and samples of ``dataset`` are reported by name."""

    def __init__(self, row: memoryview, dataset: object, collate: object) -> None:
        in_worker = multiprocessing.parent_process() is not None
        self._row = row  # ``ROW_BYTES`` of shared memory
        self._times = Histogram()
        self._took: list[float] = []  # seconds of tasks not in the histogram yet
        self._tasks = 0
        self._began = time.monotonic()
        self._start = kernel()
        self._written = 0.0
        self._own: list[list[float]] = []  # pairs of age in seconds and private memory in bytes
        self._pss = 0  # proportional set size in bytes: a shared page counts divided by the processes sharing it
        self._next_note = self._began + FIRST_MEMORY_S if in_worker else math.inf  # when memory is next read
        self.sampler = StackSampler(alone=in_worker)
        self.sampler.min_task_s = 0.0 if in_worker else SHORT_S
        self.sampler.collate = code_of(collate)
        self.sampler.transforms = known_transforms(dataset)
        self.sampler.getters = known_getters(dataset)

    def done(self, took: float) -> None:
        """A task has ended, after ``took`` seconds."""
        self.sampler.began = 0.0
        before, self._tasks = self._tasks, self._tasks + 1
        self._took.append(took)
        now = time.monotonic()
        if before.bit_length() != self._tasks.bit_length() or now - self._written > WRITE_S:
            self._written = now
            self.write()
            if self._tasks >= ENOUGH:
                self.sampler.slow_s = SLOW * self._times.median()

    def write(self) -> None:
        """Writes the record. A reader gets all of it or nothing."""
        self._times.add(self._took)
        self._took.clear()
        self._note_memory()
        top = sorted(self.sampler.counts.items(), key=lambda kv: -sum(kv[1]))[:TOP]
        now = kernel()
        now["cpu_ns"] -= int(self.sampler.cpu_s * 1e9)  # the sampling thread is stoker's cost, not the dataset's
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
        """Records this worker's memory every ``MEMORY_S``."""
        now = time.monotonic()
        if now >= self._next_note:
            self._next_note = now + MEMORY_S
            self._pss, private = resources.pss_and_private()
            self._own.append([round(now - self._began, 1), private])
            if len(self._own) > MAX_POINTS:
                del self._own[1:-1:2]


def read(row: memoryview) -> JsonObject | None:
    """Reads the record from a row; None if it is missing or half-written."""
    length = int.from_bytes(row[:4], "little")
    if not 0 < length <= ROW_BYTES - 4:
        return None
    try:
        found = json.loads(bytes(row[4 : 4 + length]))
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.keys() >= KEYS else None


def merge(records: Iterable[JsonObject]) -> JsonObject:
    """Merges the records of several processes into one."""
    times = Histogram()
    stacks: dict[tuple[str, str, str], list[int]] = {}
    slow, sums = Counter[str](), Counter[str]()
    seconds = 0.0
    own: list[list[list[float]]] = []
    for record in records:
        # A record may come from one process, or from an earlier merge of several.
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
    """Subtracts an earlier record of the same process; None if nothing is new."""
    if record["seconds"] <= before["seconds"]:
        return None
    old = {tuple(key): count for *key, ran, waited in before["stacks"] for count in [(ran, waited)]}
    stacks = []
    for *key, ran, waited in record["stacks"]:
        was = old.get(tuple(key), (0, 0))
        stacks.append([*key, max(0, ran - was[0]), max(0, waited - was[1])])
    return {
        **record,
        "bins": Counter(record["bins"]) - Counter(before["bins"]),
        "slow": Counter(record["slow"]) - Counter(before["slow"]),
        "kernel": {k: n - before["kernel"].get(k, 0) for k, n in record["kernel"].items()},
        "stacks": [row for row in stacks if row[3] or row[4]],
        "seconds": record["seconds"] - before["seconds"],
    }


def kernel() -> dict[str, int]:
    """Returns the kernel's counters for this process (proc(5)): ``delay_ns`` that its main thread waited for a core,
    ``stored`` bytes read from storage, ``cpu_ns`` of all threads, and the part ``system_ns`` spent in the kernel."""
    system_ns = round(os.times().system * 1e9)
    out = {"delay_ns": 0, "stored": 0, "system_ns": system_ns, "cpu_ns": time.process_time_ns()}
    with contextlib.suppress(OSError, ValueError, IndexError):
        out["delay_ns"] = int(Path("/proc/self/schedstat").read_text().split()[1])
    with contextlib.suppress(OSError, ValueError):
        io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        out["stored"] = int(io["read_bytes"])
    return out
