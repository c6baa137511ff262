"""What observing costs: ``python -m benchmarks.observe``.

In one process, with the watch attached as ``stoker run`` does it. *Steps*: a loop of 1,000 steps a second (each spins
for a millisecond of wall time), in blocks with and without the watch, in turns; the difference of a step's time is the
watch's. *Inside*: a worker whose samples go through a list of transforms, with and without the looks at their
stacks, in turns, nobody stepping, so that the worker's rate is what is seen. One process may be some percent faster
than another that does the same for as long as it lives, so there are several pairs; looks are many in a worker's
first seconds, and those are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.utils.data.dataloader as loader_module
from torch.utils.data import DataLoader, Dataset

from stoker import live, watching

from .tuning import Python

STEP_S = 1e-3
BLOCK = 1000  # steps: each block has its report to stoker run, once a second
ROUNDS = 25
WINDOW_S = 0.25
PAIRS, WINDOWS = 6, 16
WARM_S = 4.0
AHEAD = 12  # batches, three times what is made ahead
TARGETS = {"steps": 0.01, "inside": 0.03}


class Rows(Dataset):
    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.zeros(8)


class Listed(Python):
    """Three transforms, one of them slow, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = Compose([torch.abs, super().__getitem__, torch.neg])

    def __getitem__(self, i: int) -> Any:
        return self.transform(torch.ones(()))


class Compose:
    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, x: Any) -> Any:
        for t in self.transforms:
            x = t(x)
        return x


def unwatched(loader: DataLoader[Any]) -> Any:
    it = iter(loader)
    it.__dict__.pop("_stoker_clock")
    if hasattr(it, "_dataset_fetcher"):
        it._dataset_fetcher.__dict__.pop("_stoker_stages", None)
    return it


def block(it: Any, n: int) -> float:
    """Seconds a step."""
    began = time.perf_counter()
    for _ in range(n):
        next(it)
        end = time.perf_counter() + STEP_S
        while time.perf_counter() < end:
            pass
    return (time.perf_counter() - began) / n


def steps(rng: random.Random) -> list[tuple[float, float]]:
    loader = DataLoader(Rows(), batch_size=8)
    its = {"watched": iter(loader), "plain": unwatched(loader)}
    out = []
    for r in range(ROUNDS + 1):
        seen = {name: block(its[name], BLOCK) for name in rng.sample(sorted(its), 2)}
        if r:
            out.append((seen["plain"], seen["watched"]))
    return out


def inside(rng: random.Random) -> list[tuple[float, float]]:
    def start(looks: bool) -> Any:
        loader = DataLoader(Listed(), batch_size=16, num_workers=1, prefetch_factor=4)
        if looks:
            return iter(loader)
        account = live.Stages.inside
        live.Stages.inside = lambda self, *_: Nothing()  # type: ignore[method-assign, assignment, return-value]
        try:
            return iter(loader)  # its workers are forked here
        finally:
            live.Stages.inside = account  # type: ignore[method-assign]

    def window(it: Any, seconds: float) -> float:
        """Seconds a batch."""
        for _ in range(AHEAD):  # made while nobody asked
            next(it)
        began, n = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            next(it)
            n += 1
        return (time.perf_counter() - began) / n

    out = []
    for _ in range(PAIRS):
        # While one of them is not asked, its worker sleeps.
        its = {looks: start(looks) for looks in rng.sample([False, True], 2)}
        for it in its.values():
            window(it, WARM_S)
        for _ in range(WINDOWS):
            seen = {looks: window(its[looks], WINDOW_S) for looks in rng.sample([False, True], 2)}
            out.append((seen[False], seen[True]))
    return out


class Nothing:
    """An account that nobody keeps."""

    class looks:
        began = 0.0

    def done(self, took: list[float]) -> None:
        took.clear()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="raw lines")
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    watching.attach(loader_module)
    lines = []
    for name, measure in (("steps", steps), ("inside", inside)):
        pairs = measure(random.Random(a.seed))
        lines += [{"what": name, "plain_s": p, "watched_s": w} for p, w in pairs]
        ratios = sorted(w / p - 1 for p, w in pairs)
        middle, low, high = statistics.median(ratios), ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        ok = "ok" if middle < TARGETS[name] else "MISSED"
        print(f"{name:8} {middle:+.2%} (quartiles {low:+.2%} to {high:+.2%}), at most {TARGETS[name]:.0%}: {ok}")
    if a.json:
        a.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
