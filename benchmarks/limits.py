"""What the machine can do without a loader: bare processes that do the same work."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from . import workloads as w

WORKERS = 2
ROUNDS = 24  # batches of each process
SLOTS = 3


def _children(work: Callable[[int, int, int], None]) -> list[tuple[int, int, int]]:
    """Forks the processes; each gets its number, a pipe to read and one to write. Returns pid, to read, to write."""
    out = []
    for k in range(WORKERS):
        (go, ask), (done, tell) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            work(k, go, tell)
            os._exit(0)
        out.append((pid, done, ask))
    return out


def transport() -> dict[str, float]:
    """GB/s of stacking into shared memory that is used again and again: alone, and with a consumer that reads a float
    of each page, from a bare ring of slots and one byte per message."""
    dataset = w.Big()
    memory = [[mmap.mmap(-1, w.BATCH_BYTES) for _ in range(SLOTS)] for _ in range(WORKERS)]

    def views(k: int) -> list[torch.Tensor]:
        return [torch.frombuffer(m, dtype=torch.float32).view(256, *w.SAMPLE) for m in memory[k]]

    def fill(k: int, out: torch.Tensor) -> None:
        torch.stack([dataset[i] for i in range(256)], 0, out=out)

    def alone(k: int, go: int, tell: int) -> None:
        slots = views(k)
        for slot in slots:
            fill(k, slot)
        began = time.perf_counter()
        for i in range(ROUNDS):
            fill(k, slots[i % SLOTS])
        os.write(tell, json.dumps(time.perf_counter() - began).encode())

    def ring(k: int, go: int, tell: int) -> None:
        slots = views(k)
        for slot in slots:
            fill(k, slot)
        os.write(tell, b"r")
        os.read(go, 1)
        for i in range(ROUNDS):
            if i >= SLOTS:
                os.read(go, 1)
            fill(k, slots[i % SLOTS])
            os.write(tell, b"x")

    children = _children(alone)
    seconds = [float(os.read(read, 100)) for _, read, _ in children]
    for pid, _, _ in children:
        os.waitpid(pid, 0)
    total = WORKERS * ROUNDS * w.BATCH_BYTES / 1e9
    out = {"transport unread": total / max(seconds)}
    children = _children(ring)
    mine = [views(k) for k in range(WORKERS)]
    for k, (_, read, _) in enumerate(children):
        os.read(read, 1)
        for slot in mine[k]:
            w.touch(slot)
    began = time.perf_counter()
    for _, _, write in children:
        os.write(write, b"g")
    for i in range(ROUNDS):
        for k, (_, read, write) in enumerate(children):
            os.read(read, 1)
            w.touch(mine[k][i % SLOTS])
            os.write(write, b"a")
    out["transport persistent"] = total / (time.perf_counter() - began)
    for pid, _, _ in children:
        os.waitpid(pid, 0)
    return out


def jpeg() -> dict[str, float]:
    """Images a second of processes that decode the same photographs and stack them into memory they use again."""
    dataset: Any = w.Photos(w.photos())
    half = len(dataset) // WORKERS

    def work(k: int, go: int, tell: int) -> None:
        out = torch.empty(100, 3, 64, 64)
        order = torch.randperm(len(dataset)).tolist()
        torch.stack([dataset[i][0] for i in order[:100]], 0, out=out)
        began = time.perf_counter()
        for at in range(0, half, 100):
            torch.stack([dataset[i][0] for i in order[at : at + 100]], 0, out=out)
        os.write(tell, json.dumps(time.perf_counter() - began).encode())

    children = _children(work)
    seconds = [float(os.read(read, 100)) for _, read, _ in children]
    for pid, _, _ in children:
        os.waitpid(pid, 0)
    return {"jpeg": WORKERS * half / max(seconds)}


def overhead() -> dict[str, float]:
    """Batches a second of processes that make them and tell nobody, and of the same with a bare ring: one byte per
    message, which says that a batch lies in one of two slots, and a consumer that looks at it."""
    dataset = w.Tiny()
    each = len(dataset) // 64 // WORKERS
    memory = [[mmap.mmap(-1, 4096) for _ in range(2)] for _ in range(WORKERS)]

    def views(k: int) -> list[torch.Tensor]:
        return [torch.frombuffer(m, dtype=torch.int64, count=64) for m in memory[k]]

    def fill(i: int, out: torch.Tensor) -> None:
        torch.stack([dataset[j] for j in range(64 * i, 64 * i + 64)], 0, out=out)

    def alone(k: int, go: int, tell: int) -> None:
        slots = views(k)
        fill(0, slots[0])
        began = time.perf_counter()
        for i in range(each):
            fill(i, slots[i % 2])
        os.write(tell, json.dumps(time.perf_counter() - began).encode())

    def ring(k: int, go: int, tell: int) -> None:
        slots = views(k)
        fill(0, slots[0])
        os.write(tell, b"r")
        os.read(go, 1)
        for i in range(each):
            if i >= 2:
                os.read(go, 1)
            fill(i, slots[i % 2])
            os.write(tell, b"x")

    children = _children(alone)
    seconds = [float(os.read(read, 100)) for _, read, _ in children]
    for pid, _, _ in children:
        os.waitpid(pid, 0)
    out = {"overhead, bare processes": WORKERS * each / max(seconds)}
    children = _children(ring)
    mine = [views(k) for k in range(WORKERS)]
    for _, read, _ in children:
        os.read(read, 1)
    began = time.perf_counter()
    for _, _, write in children:
        os.write(write, b"g")
    for i in range(each):
        for k, (_, read, write) in enumerate(children):
            os.read(read, 1)
            w.touch(mine[k][i % 2])
            os.write(write, b"a")
    out["overhead persistent"] = WORKERS * each / (time.perf_counter() - began)
    for pid, _, _ in children:
        os.waitpid(pid, 0)
    return out


def staged() -> dict[str, float]:
    """Images a second of one thread that gathers, flips and converts what lies in memory."""
    from . import staging

    return {"staged: later epochs": statistics.median(staging.bare_rates())}


def startup() -> dict[str, float]:
    """Milliseconds of as many forks of a process that has imported torch; their children end at once."""
    began = time.perf_counter()
    children = [os.fork() or os._exit(0) for _ in range(WORKERS)]
    out = {f"startup fork, {WORKERS} workers: bare forks": (time.perf_counter() - began) * 1e3}
    for pid in children:
        os.waitpid(pid, 0)
    return out


LIMITS = {"transport": transport, "jpeg": jpeg, "overhead": overhead, "staged": staged, "startup": startup}
