"""What a process that fetches knows of its tasks beyond their sums: how long each took, where it was, what the kernel
says of it. Written as text into memory that the watching process shares; it dies with the process that wrote it."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...core import resources
from ...core.stacks import known_getters, known_transforms
from .stack_sampler import StackSampler

ROW_BYTES = 8192
KEYS = {"pid", "bins", "stacks", "helpers", "slow", "kernel", "seconds", "own"}
WEIGH_S = 2.0  # between two readings of a worker's own memory, which take milliseconds each
WEIGHED = 24  # of them; after that every other one is dropped
SERIES = 8  # workers whose memory is kept, those that grew most
WRITE_S, MAIN_WRITE_S = 0.2, 1.0  # a worker may end at any moment
SHORT_S = 1e-3  # a task in the main process; a look at it would cost the script more than it could say
TOP = 16  # lines of code that are kept
BINS_PER_OCTAVE = 4  # of the histogram of tasks' times, so its median is right to 9 %
SLOW = 3.0  # a task that takes so many times the median is a slow one
ENOUGH = 16  # tasks before anybody is called slow


def bin_of(seconds: float) -> int:
    """The histogram's bin; microseconds are around 0."""
    return max(0, round(BINS_PER_OCTAVE * math.log2(max(seconds, 1e-6) * 1e6)))


def add(bins: dict[int, int], seconds: list[float]) -> None:
    """Counts durations in a histogram, and empties their list."""
    taken, seconds[:] = seconds[:], []
    for s in taken:
        b = bin_of(s)
        bins[b] = bins.get(b, 0) + 1


def seconds_of(bin_: int) -> float:
    """The middle of a bin.

    Example:
        >>> abs(seconds_of(bin_of(0.25)) / 0.25 - 1) < 0.1
        True
    """
    return float(2 ** (bin_ / BINS_PER_OCTAVE)) * 1e-6


class WorkerRecord:
    """One fetching thread's own account.

    Args:
        row: ``ROW_BYTES`` of shared memory.
        dataset: whose transforms and samples are called by name.
        collate: the loader's collate function.
    """

    def __init__(self, row: Any, dataset: Any, collate: Any) -> None:
        self._row = row
        self._bins: dict[int, int] = {}
        self._took: list[float] = []
        self._began = time.monotonic()
        self._tasks = 0
        self._start = kernel()
        self._written, self._write_s = 0.0, WRITE_S
        worker = multiprocessing.parent_process() is not None
        self._own: list[list[float]] = []
        self._weighed = 0.0 if worker else math.inf
        self.looks = StackSampler(threading.get_ident(), threading.get_native_id(), alone=worker)
        if not worker:
            self.looks.least_s, self._write_s = SHORT_S, MAIN_WRITE_S
        self.looks.collate = getattr(collate, "__code__", None)
        self.looks.transforms = known_transforms(dataset)
        self.looks.getters = known_getters(dataset)

    def done(self, took: list[float]) -> None:
        """So many tasks are over, each after so many seconds. Empties the list."""
        before, self._tasks = self._tasks, self._tasks + len(took)
        self._took += took
        took.clear()
        now = time.monotonic()
        if before.bit_length() != self._tasks.bit_length() or now - self._written > self._write_s:
            self._written = now
            self.write()
            if self._tasks >= ENOUGH:
                typical, looks = median(self._bins), self.looks
                looks.slow_s = SLOW * typical
                # Who looks at nothing but short tasks, which are not looked at, need not wake up for that.
                looks.rests = looks.least_s > 0 and typical < looks.least_s

    def write(self) -> None:
        """Hands over what is known. A reader finds all of it or nothing."""
        add(self._bins, self._took)
        self._weigh()
        top = sorted(self.looks.counts.items(), key=lambda kv: -sum(kv[1]))[:TOP]
        now = kernel()
        now["cpu_ns"] -= int(self.looks.cpu_s * 1e9)  # the looks are not the dataset's threads
        text = json.dumps(
            {
                "pid": os.getpid(),
                "bins": self._bins,
                "stacks": [[*key, *count] for key, count in top],
                "helpers": self.looks.helpers,
                "slow": dict(sorted(self.looks.slow.items(), key=lambda kv: -kv[1])[:8]),
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

    def _weigh(self) -> None:
        """Notes what this worker has of its own, now and then."""
        now = time.monotonic()
        if now - self._weighed < WEIGH_S:
            return
        self._weighed = now
        self._own.append([round(now - self._began, 1), resources.private()])
        if len(self._own) > WEIGHED:
            del self._own[1:-1:2]


def read(row: Any) -> dict[str, Any] | None:
    """What ``write`` left there; None for nothing, or for half of something."""
    length = int.from_bytes(row[:4], "little")
    if not 0 < length <= ROW_BYTES - 4:
        return None
    try:
        found = json.loads(bytes(row[4 : 4 + length]))
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.keys() >= KEYS else None


def median(bins: dict[int, int]) -> float:
    """Seconds.

    Example:
        >>> median({bin_of(0.1): 5, bin_of(2.0): 1}) < 0.2
        True
    """
    half, count = sum(bins.values()) / 2, 0
    for b in sorted(bins):
        count += bins[b]
        if count >= half:
            return seconds_of(b)
    return 0.0


def merge(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The accounts of several processes as one."""
    bins: dict[int, int] = {}
    stacks: dict[tuple[str, str, str], list[int]] = {}
    slow: dict[str, int] = {}
    sums: dict[str, int] = {}
    helpers = [0, 0, 0]
    seconds = 0.0
    own: list[list[list[float]]] = []
    for record in records:
        # A record is of one process, or of several that were merged before.
        own += record["own"] if "pid" not in record else [record["own"]] if record["own"] else []
        helpers = [a + b for a, b in zip(helpers, record["helpers"], strict=True)]
        for b, n in record["bins"].items():
            bins[int(b)] = bins.get(int(b), 0) + n
        for kind, name, line, ran, waited in record["stacks"]:
            count = stacks.setdefault((kind, name, line), [0, 0])
            count[0] += ran
            count[1] += waited
        for index, n in record["slow"].items():
            slow[index] = slow.get(index, 0) + n
        for what, n in record["kernel"].items():
            sums[what] = sums.get(what, 0) + n
        seconds += record["seconds"]
    order = sorted(stacks.items(), key=lambda kv: -sum(kv[1]))
    return {
        "bins": bins,
        "stacks": [[*key, *count] for key, count in order],
        "helpers": helpers,
        "slow": slow,
        "kernel": sums,
        "seconds": seconds,
        "own": sorted(own, key=lambda series: series[0][1] - series[-1][1])[:SERIES],
    }


def minus(record: dict[str, Any], before: dict[str, Any]) -> dict[str, Any] | None:
    """A process' account without what it said before; None where nothing is new."""
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
        "helpers": [a - b for a, b in zip(record["helpers"], before["helpers"], strict=True)],
        "seconds": record["seconds"] - before["seconds"],
    }


def kernel() -> dict[str, int]:
    """What the kernel counts for this process (proc(5)): nanoseconds that its main thread waited for a core, bytes read
    from storage and in all, major faults; and nanoseconds of CPU of all threads, and of that in the kernel."""
    out = {"delay_ns": 0, "stored": 0, "read": 0, "faults": 0, "system_ns": 0, "cpu_ns": time.process_time_ns()}
    with contextlib.suppress(OSError, ValueError, IndexError):
        out["delay_ns"] = int(Path("/proc/self/schedstat").read_text().split()[1])
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        out["faults"] = int(fields[9])
        out["system_ns"] = int(fields[12]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    with contextlib.suppress(OSError, ValueError):
        io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        out["stored"], out["read"] = int(io["read_bytes"]), int(io["rchar"])
    return out
