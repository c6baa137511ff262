"""The tuner against an exhaustive grid on the same machine: ``python -m benchmarks.tuning run|online|table``.

For each workload, in a process of its own: ``stoker.tune`` as anybody would call it; then every cell of a grid
(workers x method x prefetch), each a fresh loader, in rounds of changing order; then the three best cells and the
answer again, in turns, because the best of many noisy figures is too good, and until the interval of their ratio says
on which side of 95 % it lies. Last, a loader that tunes itself from the worst start (1 worker, 1 batch ahead) for 20
seconds, and then in turns with the answer.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

import stoker
from stoker.core import resources
from stoker.core.options import AutoWorkers
from stoker.loader.loader_state import state_of
from stoker.tuning.result import Setting

from . import workloads as w

ROOT = Path(__file__).parent.parent
WORKERS = (0, 1, 2, 3, 4, 6, 8, 16, 32)
PREFETCH = (2, 4, 8)
ROUNDS = 2
WINDOW_S = 0.7
WARM_S = 1.0  # after the first batch, at least, and until as many have come as are in flight; then slots are there
FINAL, AT_MOST = 6, 24  # rounds of the best cells and the answer: more than the first, until the interval decides
ONLINE_S = 20.0
SHARE, PART, LIMIT_S, ONLINE_SHARE = 0.95, 0.15, 60.0, 0.95  # what the table asks for


class Far(Dataset):
    """Samples from a slow disk: latency, no work."""

    def __init__(self, seconds: float = 0.002, work: int = 0) -> None:
        self.seconds, self.work = seconds, work

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(self.seconds)
        sum(range(self.work))
        return torch.zeros(16)


class OneDisk(Far):
    """A disk that serves four at a time, whoever asks."""

    def __init__(self) -> None:
        super().__init__(0.002)
        self.heads = torch.multiprocessing.get_context().Semaphore(4)

    def __getitem__(self, i: int) -> torch.Tensor:
        with self.heads:
            time.sleep(self.seconds)
        return torch.zeros(16)


class Python(Far):
    """A transform in Python, which holds the interpreter lock."""

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(float(sum(k * k for k in range(3000))))


class Packed(Far):
    """Decompression, which lets the lock go."""

    def __init__(self) -> None:
        super().__init__()
        noise = np.random.default_rng(0).integers(0, 12, 200_000, dtype=np.uint8)
        self.blob = zlib.compress(noise.tobytes())

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(zlib.decompress(self.blob)), dtype=torch.uint8)


class Heavy(Python):
    """Each worker builds a table of 200 MB."""

    table: Any = None

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.table is None:
            self.table = np.ones(25_000_000)
        return super().__getitem__(i)


class Text(Far):
    """Words to numbers, sentences of different lengths, padded by a collate function."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = {f"word{k}": k for k in range(20_000)}

    def __getitem__(self, i: int) -> torch.Tensor:
        words = [f"word{(i * 7919 + 31 * k) % 20_000}" for k in range(20 + i % 100)]
        return torch.tensor([self.vocabulary[word] for word in words])


def pad(batch: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)


class Stream(IterableDataset):
    """Lines of a file without an end, parsed."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        k = info.id if info else 0
        while True:
            file = io.StringIO(",".join(str(k * n) for n in range(200)))
            yield torch.tensor([float(x) for x in file.read().split(",")])
            k += 1


class FarStream(IterableDataset):
    """A stream that waits for a network."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.002)
            yield torch.zeros(16)


class Rare(Far):
    """Stragglers: 5 % of samples take 20 times as long."""

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(0.020 if zlib.crc32(i.to_bytes(8, "little")) % 20 == 0 else 0.001)
        return torch.zeros(16)


# Dataset and keyword arguments.
LOADS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "jpeg": (lambda: w.Photos(w.photos()), {"batch_size": 32, "shuffle": True}),
    "tiny items": (w.Tiny, {"batch_size": 64}),
    "big items": (w.Big, {"batch_size": 64}),
    "slow disk": (Far, {"batch_size": 16, "shuffle": True}),
    "slow disk and work": (lambda: Far(0.001, 30_000), {"batch_size": 16}),
    "disk that saturates": (OneDisk, {"batch_size": 16}),
    "python transform": (Python, {"batch_size": 16}),
    "decompression": (Packed, {"batch_size": 16}),
    "stragglers": (Rare, {"batch_size": 4, "shuffle": True}),
    "heavy workers": (Heavy, {"batch_size": 16}),
    "in memory": (lambda: TensorDataset(torch.randn(1 << 19, 32)), {"batch_size": 1024, "shuffle": True}),
    "text": (Text, {"batch_size": 64, "collate_fn": pad}),
    "stream": (Stream, {"batch_size": 32}),
    "stream, far": (FarStream, {"batch_size": 16}),
}


def rate(name: str, s: Setting) -> tuple[float, float]:
    """Batches per second of a fresh loader with a setting, and the seconds that measuring it took."""
    make, kw = LOADS[name]
    began = time.monotonic()
    more: dict[str, Any] = {"num_workers": s.num_workers}
    if s.num_workers:
        # They stay: what starting them anew costs an epoch, which is short here, is another knob.
        more |= {"prefetch_factor": s.prefetch_factor, "persistent_workers": True}
    batches = forever(stoker.DataLoader(make(), **kw, **more))
    n = max(1, s.num_workers)
    value = steady(batches, n, n * s.prefetch_factor)
    del batches
    return value, time.monotonic() - began


def forever(loader: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def steady(batches: Iterator[Any], n: int, flying: int) -> float:
    """Batches per second, once it runs.

    Args:
        batches: without an end.
        n: workers.
        flying: how many are made ahead.
    """
    first = start = 0.0
    warm = flying
    for count, _ in enumerate(batches, 1):
        now = time.monotonic()
        if count == 1:
            first = now
        if not start and now - first > WARM_S and (count >= warm or (now - first > 2 * WARM_S and count >= n)):
            start, warm = now, count
        elif start and (count - warm) % n == 0:  # whole turns: workers that are in step deliver in bursts
            enough = WINDOW_S if count - warm >= flying else 2 * WINDOW_S  # as does what waited behind a slow one
            if now - start >= enough:
                return (count - warm) / (now - start)
    raise AssertionError("they were to have no end")


def offline(name: str, emit: Callable[..., None], rounds: int) -> Setting:
    make, kw = LOADS[name]
    began = time.monotonic()
    result = stoker.tune(stoker.DataLoader(make(), **kw), name=name)
    took = time.monotonic() - began
    best = Setting(result.best.num_workers, result.best.prefetch_factor)
    most = max(t["num_workers"] for t in result.tried)
    over = [b.name for b in result.limits if b.name != "cores" and most > b.most]
    emit(what="tune", setting=cell(best), seconds=took, rate=result.rate, crossed=over, tried=len(result.tried))
    cells = [Setting(n, p) for n in WORKERS for p in PREFETCH if n or p == 2]
    order, seen = random.Random(1), {c: [] for c in cells}  # type: dict[Setting, list[float]]
    for _ in range(rounds):
        order.shuffle(cells)
        for c in cells:
            value, s = rate(name, c)
            seen[c].append(value)
            emit(what="cell", setting=cell(c), rate=value, seconds=s)
    top = sorted(cells, key=lambda c: -statistics.median(seen[c]))[:3]
    again = list(dict.fromkeys([*top, best]))
    final: dict[Setting, list[float]] = {c: [] for c in again}
    for r in range(AT_MOST):
        for c in again if r % 2 == 0 else reversed(again):
            value, _ = rate(name, c)
            final[c].append(value)
            emit(what="final", setting=cell(c), rate=value, answer=c == best)
        _, low, high = share(final, seen, best)
        if r + 1 >= FINAL and not low < SHARE < high:
            break
    return best


def paired(a: list[float], b: list[float]) -> tuple[float, float, float]:
    """How much faster ``b`` is than ``a``, measured in turns, and about 95 % of that: mean and two standard errors of
    the logarithm of the ratio. What slows both of a pair does not count."""
    logs = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    mean = statistics.fmean(logs)
    half = 2 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return math.exp(mean), math.exp(mean - half), math.exp(min(mean + half, 700.0))


def share(final: Mapping[Any, list[float]], grid: Mapping[Any, list[float]], answer: Any) -> tuple[float, float, float]:
    """The answer's rate over that of the cell with the best figures of all, and its 95 % interval."""
    best = max((c for c in final if c in grid), key=lambda c: statistics.fmean(final[c] + grid[c]))
    return paired(final[best], final[answer])


def online(name: str, best: Setting, emit: Callable[..., None]) -> None:
    """From the worst start; then its windows and the answer's in turns."""
    make, kw = LOADS[name]
    if isinstance(make(), IterableDataset) or not best.num_workers:
        return  # shards, and a loop without workers, do not change within an epoch
    kw = {**kw, "shuffle": False}
    loader = stoker.DataLoader(make(), num_workers="auto", prefetch_factor=1, persistent_workers=True, **kw)
    state_of(loader).first_count_reason = "the worst start"
    loader.num_workers = AutoWorkers(1)
    batches = forever(loader)
    began = time.monotonic()
    for count, _ in enumerate(batches, 1):
        if time.monotonic() - began > ONLINE_S and count > 60:
            break
    turns: list[tuple[float, float]] = []
    while len(turns) < AT_MOST:
        n = int(loader.num_workers)
        flying = n * (loader.prefetch_factor or 1)
        own = steady(batches, n, flying)
        time.sleep(flying / own)  # its workers make what is in flight, and are not to do so beside the other's
        turns.append((own, rate(name, best)[0]))
        emit(
            what="online",
            rate=own,
            answer=turns[-1][1],
            workers=int(loader.num_workers),
            prefetch=loader.prefetch_factor,
            decisions=len(loader.decisions),
        )
        _, low, high = of_the_answer(turns)
        if len(turns) >= FINAL and not low < ONLINE_SHARE < high:
            break


def of_the_answer(turns: list[tuple[float, float]]) -> tuple[float, float, float]:
    """The loader's own rate over the answer's, and its 95 % interval."""
    return paired([answer for _, answer in turns], [own for own, _ in turns])


def cell(s: Setting) -> list[Any]:
    return [s.num_workers, "process", s.prefetch_factor]


def table(lines: list[dict[str, Any]]) -> str:
    head = ["workload", "answer", "of the grid's best", "seconds", "of the grid's", "online, of the answer", ""]
    out = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name in LOADS:
        of = [x for x in lines if x.get("workload") == name]
        if not any(x["what"] == "final" for x in of):
            continue
        (tuned,) = [x for x in of if x["what"] == "tune"]
        grid_s = sum(x["seconds"] for x in of if x["what"] == "cell")
        final: dict[tuple[Any, ...], list[float]] = {}
        grid: dict[tuple[Any, ...], list[float]] = {}
        for x in of:
            if x["what"] in ("final", "cell"):
                of_what = final if x["what"] == "final" else grid
                of_what.setdefault(tuple(x["setting"]), []).append(x["rate"])
        part_of, low, high = share(final, grid, tuple(tuned["setting"]))
        self_tuned = [x for x in of if x["what"] == "online"]
        own, *sure = of_the_answer([(x["rate"], x["answer"]) for x in self_tuned]) if self_tuned else [math.nan] * 3
        ok = part_of >= SHARE and tuned["seconds"] <= min(LIMIT_S, PART * grid_s) and not tuned["crossed"]
        ok = ok and not own < ONLINE_SHARE
        n, method, prefetch = tuned["setting"]
        words = f"{n} {method}, {prefetch}" if n else "0"
        live = f"{own:.0%} ({sure[0]:.0%} to {sure[1]:.0%})" if self_tuned else ""
        part = f"{tuned['seconds'] / grid_s:.0%} of {grid_s:.0f}"
        row = [
            name,
            words,
            f"{part_of:.0%} ({low:.0%} to {high:.0%})",
            f"{tuned['seconds']:.1f}",
            part,
            live,
            "ok" if ok else "MISSED",
        ]
        out.append("| " + " | ".join(row) + " |")
    return "\n".join(out)


def one(name: str, rounds: int, live: bool, answer: Setting | None = None) -> None:
    def emit(**fields: Any) -> None:
        print(json.dumps({"workload": name, **fields}), flush=True)

    best = answer or offline(name, emit, rounds)
    if live:
        online(name, best, emit)


def measured(name: str, *options: str) -> list[dict[str, Any]]:
    """The lines of one workload, from a process of its own."""
    began = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.tuning", "one", name, *options]
    p = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if p.returncode:
        print(f"{name} failed:\n{p.stderr}", file=sys.stderr)
    print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return [json.loads(line) for line in p.stdout.splitlines() if line.startswith("{")]


def kept(path: str) -> list[dict[str, Any]]:
    """Raw lines of an earlier run."""
    try:
        return [json.loads(line) for line in Path(path).read_text().splitlines()]
    except (OSError, ValueError) as e:
        raise argparse.ArgumentTypeError(f"{path} holds no raw lines: {e}") from None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command")
    r = commands.add_parser("run", help="measure; seventy minutes on two cores")
    r.add_argument("--workloads", nargs="+", choices=LOADS, default=list(LOADS), metavar="NAME")
    r.add_argument("--rounds", type=int, default=ROUNDS)
    r.add_argument("--no-online", action="store_true")
    r.add_argument("--json", type=Path, metavar="FILE")
    t = commands.add_parser("table", help="the table of raw lines kept earlier")
    t.add_argument("file", type=kept)
    again = commands.add_parser("online", help="raw lines kept earlier, the last part measured anew; nine minutes")
    again.add_argument("file", type=kept)
    again.add_argument("--json", type=Path, metavar="FILE", required=True)
    o = commands.add_parser("one")
    o.add_argument("name")
    o.add_argument("--answer", type=json.loads)
    o.add_argument("--rounds", type=int, default=ROUNDS)
    o.add_argument("--no-online", action="store_true")
    a = parser.parse_args()
    if a.command == "one":
        one(a.name, a.rounds, not a.no_online, Setting(*a.answer) if a.answer else None)
        return 0
    if a.command == "online":
        lines = [line for line in a.file if line.get("what") != "online"]
        for tuned in [line for line in lines if line.get("what") == "tune"]:
            lines += measured(tuned["workload"], "--answer", json.dumps(tuned["setting"]))
        a.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(table(lines))
        return 0
    if a.command == "table":
        print(table(a.file))
        return 0
    path = a.json or ROOT / "benchmarks" / "results" / "local" / time.strftime("tuning-%Y%m%d-%H%M%S.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [{"machine": resources.read().as_dict()}]
    with open(path, "w") as raw:
        raw.write(json.dumps(lines[0]) + "\n")
        for name in a.workloads:
            new = measured(name, "--rounds", str(a.rounds), *(["--no-online"] if a.no_online else []))
            lines += new
            raw.writelines(json.dumps(line) + "\n" for line in new)
            raw.flush()
    print(table(lines))
    print(f"raw lines: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
