"""Far storage: ``python -m benchmarks.far run|table``.

A server in a process of its own answers each request after so many milliseconds, with 4 KB. A sample is one request
(``urllib``), shuffled, batch 32, 2 workers. Every contestant's batches have to be the same to the bit. Between two
epochs nothing is kept; workers stay.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import statistics
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import stoker

from .command import Line, in_turns, main

SAMPLES, BATCH, WORKERS, EPOCHS = 1024, 32, 2, 2
LATENCIES_MS = (20, 5)
TARGET = 8.0  # times torch's loader, at 20 ms
CONTESTANTS: dict[str, dict[str, Any]] = {
    "torch": {},
    "stoker": {},
    'read_threads="auto"': {"read_threads": "auto"},
    "read_threads=8": {"read_threads": 8},
}
MEASURED = 'read_threads="auto"'


def serve(latency_s: float, address: Any) -> None:
    """Answers until it is killed; sends its port through the pipe ``address``."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(latency_s)
        number = int(request.split(b" ", 2)[1][1:])
        body = np.full(1024, number, np.float32).tobytes()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=256)
        address.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


class Rows(Dataset[Any]):
    """Samples of a server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> torch.Tensor:
        with urllib.request.urlopen(f"{self.url}/{i}") as answer:
            return torch.frombuffer(bytearray(answer.read()), dtype=torch.float32)


def one(name: str, latency_ms: str) -> None:
    warnings.simplefilter("ignore")
    mine, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(int(latency_ms) / 1000, theirs))
    server.start()
    try:
        data = Rows(f"http://127.0.0.1:{mine.recv()}")
        cls: Any = DataLoader if name == "torch" else stoker.DataLoader
        torch.manual_seed(3)
        loader = cls(
            data, batch_size=BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True, **CONTESTANTS[name]
        )
        for epoch in range(EPOCHS):
            digest = hashlib.sha256()
            began = time.perf_counter()
            for batch in loader:
                digest.update(batch.numpy().tobytes())
            rate = SAMPLES / (time.perf_counter() - began)
            line = {"ms": int(latency_ms), "epoch": epoch, "rate": rate, "digest": digest.hexdigest()[:16]}
            print(json.dumps(line), flush=True)
    finally:
        server.kill()
        server.join()


def measure(rounds: int) -> Iterator[Line]:
    for ms in LATENCIES_MS:
        yield from in_turns("far", "contestant", CONTESTANTS, rounds, str(ms))


def table(lines: list[Line]) -> str:
    out = ["| ms a request | contestant | samples/s | times torch's | batches |", "| --- | --- | --- | --- | --- |"]
    good = True
    for ms in sorted({x["ms"] for x in lines}, reverse=True):
        rates = {
            name: [x["rate"] for x in lines if (x["ms"], x["contestant"], x["epoch"]) == (ms, name, EPOCHS - 1)]
            for name in CONTESTANTS
        }
        digests = {
            name: {(x["epoch"], x["digest"]) for x in lines if (x["ms"], x["contestant"]) == (ms, name)}
            for name in rates
        }
        for name, found in rates.items():
            ratios = [a / b for a, b in zip(found, rates["torch"], strict=True)]
            same = digests[name] == digests["torch"]
            good &= same and (name != MEASURED or ms != max(LATENCIES_MS) or statistics.median(ratios) >= TARGET)
            times = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            rate = f"{statistics.median(found):,.0f}"
            out.append(f"| {ms} | {name} | {rate} | {times} | {'the same' if same else 'NOT the same'} |")
    out += ["", f"at least {TARGET:g} times at {max(LATENCIES_MS)} ms: {'ok' if good else 'missed'}"]
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(main("far", __doc__, measure, table, one, 3))
