"""Workers that die: ``python -m benchmarks.faults run|table``.

A random worker is killed every 50 batches, by SIGKILL and SIGSEGV in turns, over 5,000 batches. Every batch has to
come, in order and to the bit as in an undisturbed run of the same process; what is measured is how much longer it
takes. Under torch the same ends the run, which is shown.

A sample is so many microseconds of NumPy work and 3 x 64 x 64 float32; a batch is 16 of them. What a death costs does
not depend on what a batch costs, so its share does: the cheaper the batches, the dearer the deaths.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import stoker

from .command import Line, in_turns, main

BATCHES, EVERY, BATCH = 5000, 50, 16
WORK = {"500 us a sample": 500, "100 us a sample": 100}
CHECKED = "500 us a sample"  # a batch of 4 ms with two workers: a small picture takes as long to decode
CALM, KILLED, TORCH = "undisturbed", "a worker killed every 50 batches", "torch, a worker killed after 50"


class Samples(Dataset[Any]):
    """Work that a processor does, an index, and draws."""

    def __init__(self, micros: int) -> None:
        self.micros = micros

    def __len__(self) -> int:
        return BATCHES * BATCH

    def __getitem__(self, i: int) -> torch.Tensor:
        end = time.thread_time_ns() + self.micros * 1000
        noise = np.full(1000, float(i))
        while time.thread_time_ns() < end:
            noise.sort()
        out = torch.rand(3, 64, 64)
        out[0, 0, 0] = i
        return out


def epoch(loader: Any, kills: bool) -> dict[str, Any]:
    """Batches a second of one epoch, and what came."""
    digest, rng, n, order = hashlib.sha256(), random.Random(5), 0, True
    began = time.perf_counter()
    it = iter(loader)
    for n, batch in enumerate(it, 1):
        digest.update(batch[:, :, ::16, ::16].numpy().tobytes())
        order = order and int(batch[0, 0, 0, 0]) == (n - 1) * BATCH
        if kills and n % EVERY == 0 and n < BATCHES:
            how = signal.SIGKILL if n // EVERY % 2 else signal.SIGSEGV
            os.kill(rng.choice([p for p in it._workers if p.is_alive()]).pid, how)
    took = time.perf_counter() - began
    return {"rate": n / took, "batches": n, "in_order": order, "digest": digest.hexdigest()[:16]}


def one(name: str, work: str = CHECKED) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(3)
    cls = DataLoader if name == TORCH else stoker.DataLoader
    loader: Any = cls(Samples(WORK[work]), batch_size=BATCH, num_workers=2)
    try:
        line = epoch(loader, name != CALM)
    except RuntimeError as e:
        line = {"ended": str(e).splitlines()[0]}
    print(json.dumps({"work": work, **line}), flush=True)


def measure(rounds: int) -> Iterator[Line]:
    for work in WORK:
        yield from in_turns("faults", "contestant", [CALM, KILLED], rounds, work)
    yield from in_turns("faults", "contestant", [TORCH], 1)


def table(lines: list[Line]) -> str:
    out = ["| work | undisturbed, batches/s | killed, batches/s | share | kept |", "|---|---|---|---|---|"]
    good = True
    for work in WORK:
        rates: dict[str, dict[int, float]] = {CALM: {}, KILLED: {}}
        came = set()
        for x in lines:
            if x["work"] == work and x["contestant"] in rates:
                rates[x["contestant"]][x["round"]] = x.get("rate", 0.0)
                came.add((x.get("batches"), x.get("in_order"), x.get("digest")))
        shares = [rates[KILLED][r] / rates[CALM][r] for r in rates[CALM]]
        same = len(came) == 1 and {(n, order) for n, order, _ in came} == {(BATCHES, True)}
        good = good and same and (work != CHECKED or statistics.median(shares) >= 0.8)
        calm, killed = (statistics.median(rates[name].values()) for name in (CALM, KILLED))
        share = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
        out.append(
            f"| {work} | {calm:,.0f} | {killed:,.0f} | {share} "
            f"| {'all, in order, to the bit' if same else 'NOT the same'} |"
        )
    ended = next((x.get("ended", "went on") for x in lines if x["contestant"] == TORCH), "")
    out += ["", f"torch: {ended}", "", f"at least 0.80 with {CHECKED}: {'ok' if good else 'missed'}"]
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(main("faults", __doc__, measure, table, one, 3))
