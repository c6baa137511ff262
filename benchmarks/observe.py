"""What observing costs: ``python -m benchmarks.observe``.

In one process, with the watch attached as ``stoker run`` does it. *Steps*: a loop of 1,000 steps a second (each spins
for a millisecond of wall time), in blocks with and without the watch, in turns; the difference of a step's time is the
watch's. *Inside*: a worker whose samples go through a list of transforms, with and without the looks at their
stacks, in turns, nobody stepping, so that the worker's rate is what is seen. It is the same worker, told by a number in
shared memory, for one process may be some percent faster than another that does the same for as long as it lives.
Looks are many in a worker's first seconds, and those are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.utils.data.dataloader as loader_module
from torch.utils.data import DataLoader, Dataset

from stoker.diagnosis.watch import patch, stack_sampler

from .tuning import Python

STEP_S = 1e-3
BLOCK = 1000  # steps: each block has its report to stoker run, once a second
ROUNDS = 25
WINDOW_S = 1.0  # as long as looks rest
SETTLE_S = 1.0  # before it: a burst of looks begins with each turn, and it is not to be in each window
WORKERS, WINDOWS = 3, 30
WARM_S = 4.0
TARGETS = {"steps": 0.01, "inside": 0.03}
NAMES = {
    "steps": "a loop of 1,000 steps a second",
    "inside": "a worker with transforms in Python, after its first seconds",
}


class Rows(Dataset):
    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.zeros(8)


class Listed(Python):
    """Three transforms, one of them slow, in a list; and a worker that is watched or not, as a number in shared memory
    says."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = Compose([torch.abs, super().__getitem__, torch.neg])
        self.watched = torch.ones(1, dtype=torch.int64).share_memory_()
        self.was = 1

    def __getitem__(self, i: int) -> Any:
        now = int(self.watched)
        if now != self.was:
            self.was = now
            turn(sys._getframe(1), now == 1)
        return self.transform(torch.ones(()))


def turn(frame: Any, on: bool) -> None:
    """Runs in the worker: its fetcher is watched from the next batch on, and its thread looked at, or neither."""
    while "_stoker_task_timer" not in getattr(frame.f_locals.get("self"), "__dict__", {}):
        frame = frame.f_back
    fetcher = frame.f_locals["self"]
    if not isinstance(stack_sampler.time, Clock):
        stack_sampler.time = Clock(fetcher._stoker_task_timer._record.sampler._usual_s)  # type: ignore[assignment]
    timed = type(fetcher).fetch
    fetcher.fetch = functools.partial(timed if on else timed.__wrapped__, fetcher)
    (stack_sampler.time.on.set if on else stack_sampler.time.on.clear)()


class Clock:
    """The looks' time. Who sleeps by it while nobody is to look does not wake, and the interpreter's switch interval is
    what it was before anybody looked."""

    def __init__(self, usual_s: float) -> None:
        self.on, self.usual_s, self.monotonic = threading.Event(), usual_s, time.monotonic

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        if not self.on.is_set():
            interval = sys.getswitchinterval()
            sys.setswitchinterval(self.usual_s)
            self.on.wait()
            sys.setswitchinterval(interval + 5e-7)  # what it reads as 0.0002 it would cut to 0.000199


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
        it._dataset_fetcher.__dict__.pop("_stoker_times", None)
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
    def window(it: Any, seconds: float) -> float:
        """Seconds a batch."""
        began, n = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            next(it)
            n += 1
        return (time.perf_counter() - began) / n

    out = []
    for _ in range(WORKERS):
        dataset = Listed()
        it = iter(DataLoader(dataset, batch_size=16, num_workers=1, prefetch_factor=4))
        window(it, WARM_S)
        for _ in range(WINDOWS):
            seen = {}
            for on in rng.sample([0, 1], 2):
                dataset.watched.fill_(on)
                window(it, SETTLE_S)
                seen[on] = window(it, WINDOW_S)
            out.append((seen[0], seen[1]))
    return out


def figures(lines: list[dict[str, Any]], name: str) -> tuple[float, float, float]:
    """The median of what watching adds, as a share of the time without it, and the 95 % interval of that median.

    The interval is between two of the sorted values, whatever their distribution (Conover, "Practical Nonparametric
    Statistics", on quantiles).
    """
    ratios = sorted(line["watched_s"] / line["plain_s"] - 1 for line in lines if line["what"] == name)
    n = len(ratios)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return statistics.median(ratios), ratios[low], ratios[n - 1 - low]


def table(lines: list[dict[str, Any]]) -> str:
    """The same as a table."""
    out = ["| watched | pairs | median | its 95 % interval | at most |  |", "| --- | --- | --- | --- | --- | --- |"]
    for name, words in NAMES.items():
        middle, low, high = figures(lines, name)
        count = sum(line["what"] == name for line in lines)
        ok = "ok" if middle < TARGETS[name] else "MISSED"
        cells = (words, count, f"{middle:+.2%}", f"{low:+.2%} to {high:+.2%}", f"{TARGETS[name]:.0%}", ok)
        out.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="raw lines")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="measure nothing: the table of raw lines kept earlier"
    )
    a = parser.parse_args()
    if a.table:
        print(table([json.loads(line) for line in a.table.read_text().splitlines()]))
        return 0
    warnings.simplefilter("ignore")
    patch.attach(loader_module)
    lines = []
    for name, measure in (("steps", steps), ("inside", inside)):
        lines += [{"what": name, "plain_s": p, "watched_s": w} for p, w in measure(random.Random(a.seed))]
    print(table(lines))
    if a.json:
        a.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
