"""How good a shuffle is that needs little memory, and what it reads: ``python -m benchmarks.shuffle run|table``.

Orders: a million samples in files of 4096, which are chunks, too, where no other size is said; five epochs each.
Reading: a mapped file of 1 GiB that is in nobody's memory when an epoch begins, rows of 12 KiB, chunks of 1024 rows,
16 of them resident, an empty loop over ``stoker.DataLoader``; each epoch a process of its own, in turns. ``bare`` is
``pread`` from one end to the other: what the disk gives at that time.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stoker

from .command import Line, in_turns, main
from .quality import quality

SAMPLES, CHUNK, BATCH, EPOCHS, BUFFER = 1_000_000, 4096, 64, 5, 16
CLASSES = 10  # of a file that is sorted by class
ROW, ROWS, READ_CHUNK = 12_288, (1 << 30) // 12_288, 1024
ROUNDS, LOOK_S = 7, 0.05


# -- orders


def chunk_order(seed: int) -> list[Any]:
    """The files in random order."""
    chunks = np.split(np.arange(SAMPLES), range(CHUNK, SAMPLES, CHUNK))
    return [chunks[i] for i in np.random.default_rng(seed).permutation(len(chunks))]


def sampled(resident: int, size: int = CHUNK) -> Callable[[int], Any]:
    def order(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return np.fromiter(stoker.ChunkSampler(range(SAMPLES), size, resident, generator), np.int64)

    return order


def buffered(stream: Any, seed: int) -> Any:
    """What tf.data's and webdataset's ``shuffle(size)`` do: hand out any of the buffer, put the next sample there."""
    rng, size = np.random.default_rng(seed + 1), BUFFER * CHUNK
    buffer, out = stream[:size].tolist(), []
    for sample, k in zip(stream[size:].tolist(), rng.integers(0, size, len(stream) - size).tolist(), strict=True):
        out.append(buffer[k])
        buffer[k] = sample
    rng.shuffle(buffer)
    return np.array(out + buffer)


def windows(seed: int) -> Any:
    """CorgiPile: so many files are shuffled together, then the next so many."""
    chunks, rng = chunk_order(seed), np.random.default_rng(seed + 1)
    return np.concatenate(
        [rng.permutation(np.concatenate(chunks[i : i + BUFFER])) for i in range(0, len(chunks), BUFFER)]
    )


def reservoir(seed: int) -> Any:
    """As many samples as 16 files have, any of which may come next; a file comes in whenever so many have left."""
    chunks, rng, out = chunk_order(seed), np.random.default_rng(seed + 1), []
    pool = np.concatenate(chunks[:BUFFER])
    for chunk in chunks[BUFFER:]:
        rng.shuffle(pool)
        out.append(pool[:CHUNK])
        pool = np.concatenate([pool[CHUNK:], chunk])
    return np.concatenate([*out, rng.permutation(pool)])


ORDERS: dict[str, Callable[[int], Any]] = {
    "uniform": lambda seed: torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed)).numpy(),
    "chunks, 4 resident": sampled(4),
    "chunks, 16 resident": sampled(16),
    "chunks, 64 resident": sampled(64),
    "chunks of 1024, 64 resident": sampled(64, 1024),
    "16 files at once, then the next 16": windows,
    "reservoir of 16 files' samples": reservoir,
    "buffer of 16 files' samples, files in random order": lambda seed: buffered(
        np.concatenate(chunk_order(seed)), seed
    ),
    "buffer of 16 files' samples, files in order": lambda seed: buffered(np.arange(SAMPLES), seed),
    "no shuffle": lambda seed: np.arange(SAMPLES),
}


def most_open(chunk: Any) -> float:
    """The largest share of chunks that were begun and not finished."""
    n = chunk.max() + 1
    first, last, at = np.full(n, SAMPLES), np.zeros(n, np.int64), np.arange(SAMPLES)
    np.minimum.at(first, chunk, at)
    np.maximum.at(last, chunk, at)
    change = np.bincount(first, minlength=SAMPLES + 1) - np.bincount(last + 1, minlength=SAMPLES + 1)
    return float(change.cumsum().max() / n)


def measure(name: str, order: Any) -> dict[str, float]:
    assert np.array_equal(np.sort(order), np.arange(SAMPLES))
    batches = (order * CLASSES // SAMPLES)[: SAMPLES // BATCH * BATCH].reshape(-1, BATCH)
    seen = (batches[:, :, None] == np.arange(CLASSES)).any(1).sum(1)
    is_open = most_open(order // (1024 if "1024" in name else CHUNK))
    return {**quality(order, SAMPLES, CHUNK, BATCH)._asdict(), "open": is_open, "classes": float(seen.mean())}


def orders() -> Iterator[Line]:
    for seed in range(EPOCHS):
        for name, order in ORDERS.items():
            began = time.perf_counter()
            indices = order(seed)
            seconds = time.perf_counter() - began
            yield {"order": name, "seed": seed, "seconds": seconds, **measure(name, indices)}
        print(f"orders: epoch {seed + 1}/{EPOCHS}", file=sys.stderr)


# -- reading


def preads(path: Path) -> Iterator[Any]:
    buffer, fd = bytearray(ROW * READ_CHUNK), os.open(path, os.O_RDONLY)
    for at in range(0, ROW * ROWS, len(buffer)):
        yield range(os.preadv(fd, [buffer], at) // ROW)
    os.close(fd)


def loaders(rows: Any) -> dict[str, Callable[[], Any]]:
    def chunks(workers: int = 0, smaller: int = 1) -> Any:
        sampler = stoker.ChunkSampler(rows, READ_CHUNK // smaller, BUFFER * smaller)
        return stoker.DataLoader(rows, BATCH, sampler=sampler, num_workers=workers)

    def uniform() -> Any:
        rows._mmap.madvise(mmap.MADV_RANDOM)  # the kernel reads a sample's pages and no others
        return stoker.DataLoader(rows, BATCH, shuffle=True)

    return {
        "bare": lambda: preads(rows.filename),
        "in order": lambda: stoker.DataLoader(rows, BATCH),
        "chunks": lambda: chunks(),
        "chunks, a quarter as large, four times as many": lambda: chunks(smaller=4),
        "uniform": lambda: stoker.DataLoader(rows, BATCH, shuffle=True),
        "uniform, MADV_RANDOM": uniform,
        "chunks, 2 workers": lambda: chunks(2),
        "uniform, 2 workers": lambda: stoker.DataLoader(rows, BATCH, shuffle=True, num_workers=2),
    }


def in_memory(rows: Any) -> float:
    """Megabytes of the file that are in the page cache. mincore(2)."""
    pages = (ctypes.c_ubyte * -(-rows.nbytes // mmap.PAGESIZE))()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(rows.ctypes.data), ctypes.c_size_t(rows.nbytes), pages):
        raise OSError("mincore")
    return float((np.frombuffer(pages, np.uint8) & 1).sum() * mmap.PAGESIZE / 1e6)


def read(name: str, file: str) -> None:
    """One epoch over a file that nobody has in memory."""
    path = Path(file)
    rows = np.memmap(path, np.uint8, "r+", shape=(ROWS, ROW))
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    cold, most, ended = in_memory(rows), [0.0], threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            most[0] = max(most[0], in_memory(rows))

    torch.manual_seed(0)
    loader = loaders(rows)[name]()
    before, watch = resource.getrusage(resource.RUSAGE_SELF), threading.Thread(target=look)
    watch.start()
    began, first, n = time.perf_counter(), 0.0, 0
    for batch in loader:
        first = first or time.perf_counter() - began
        n += len(batch)
    seconds = time.perf_counter() - began
    del loader
    ended.set()
    watch.join()
    after, workers = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    assert n == ROWS
    line = {
        "seconds": seconds,
        "first_s": first,
        "MB_s": n * ROW / seconds / 1e6,
        "cold_MB": cold,
        "most_MB": max(most[0], in_memory(rows)),
        "disk_MB": (after.ru_inblock - before.ru_inblock + workers.ru_inblock) * 512 / 1e6,
        "major_faults": after.ru_majflt - before.ru_majflt + workers.ru_majflt,
    }
    print(json.dumps(line))


def reading(rounds: int) -> Iterator[Line]:
    with tempfile.TemporaryDirectory(prefix="stoker-shuffle-") as folder:
        path = Path(folder) / "rows"
        with open(path, "wb") as file:
            for _ in range(ROWS):
                file.write(os.urandom(ROW))
            file.flush()
            os.fsync(file.fileno())
        yield from in_turns("shuffle", "reading", loaders(np.zeros((1, 1))), rounds, str(path))


# -- tables


def table(lines: list[dict[str, Any]]) -> str:
    def values(kind: str, name: str, key: str) -> list[float]:
        return [x[key] for x in lines if x.get(kind) == name]

    out = [
        "| order | rank correlation, size | distance to uniform | pairs from one file in a batch, times uniform | "
        f"classes in a batch, of {CLASSES} | open at most, of the data | us a batch |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ORDERS:
        mean = {k: statistics.mean(values("order", name, k)) for k in ("distance", "neighbours", "classes", "seconds")}
        size = statistics.mean(map(abs, values("order", name, "rank_correlation")))
        is_open = max(values("order", name, "open"))
        cost = f"{mean['seconds'] * 1e6 * BATCH / SAMPLES:.1f}" if name.startswith("chunks") else ""
        out.append(
            f"| {name} | {size:.3f} | {mean['distance']:.3f} | {mean['neighbours']:.1f} | {mean['classes']:.1f} | "
            f"{is_open:.1%} | {cost} |"
        )
    columns = ("MB_s", "first_s", "disk_MB", "most_MB", "major_faults")
    out += ["", "| reading | MB/s | first batch, s | MB read | MB in memory, at most | major faults |"]
    out += ["|---|---|---|---|---|---|"]
    for name in loaders(np.zeros((1, 1))):
        if not values("reading", name, "MB_s"):
            continue
        rates = values("reading", name, "MB_s")
        _, first, disk, most, faults = (statistics.median(values("reading", name, c)) for c in columns)
        out.append(
            f"| {name} | {statistics.median(rates):,.0f} [{min(rates):,.0f}..{max(rates):,.0f}] | {first:.2f} | "
            f"{disk:,.0f} | {most:,.0f} | {faults:,.0f} |"
        )
    return "\n".join(out)


def lines(rounds: int) -> Iterator[Line]:
    """Orders; and reading, unless there are no rounds."""
    yield from orders()
    if rounds:
        yield from reading(rounds)


if __name__ == "__main__":
    sys.exit(main("shuffle", __doc__, lines, table, read, ROUNDS))
