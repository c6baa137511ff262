"""Staging against decoding anew: ``python -m benchmarks.staging run|table``.

Photographs of 512x384 are decoded, shrunk and cut to 64x64; half of each batch is flipped; float in [0, 1). Every
contestant goes over the same files with the same batch size, in turns, each measurement in a process of its own.
``bare`` is what one thread can do at all once everything is in memory: one gather, a flip, a conversion, into buffers
used again.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import stoker

from .command import ROOT, Line, in_turns, main

DATA = ROOT / "examples" / "data"
BATCH = 250
EPOCHS = 12  # after the first, where they are short
SIZE, BOX = (128, 96), (32, 16, 96, 80)


def files() -> list[tuple[Path, int]]:
    with open(DATA / "labels.csv", newline="") as file:
        return [(DATA / row["path"], int(row["label"])) for row in csv.DictReader(file)]


def pixels(path: Path, scaled: bool = False) -> torch.Tensor:
    """A photograph as uint8, CHW."""
    from PIL import Image

    picture = Image.open(path)
    if scaled:
        picture.draft("RGB", SIZE)
    picture = picture.convert("RGB").resize(SIZE)
    return torch.from_numpy(np.array(picture.crop(BOX))).permute(2, 0, 1)


class Photos(Dataset):
    """What people write: all of it in ``__getitem__``."""

    def __init__(self, scaled: bool = False) -> None:
        self.rows, self.scaled = files(), scaled

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        path, label = self.rows[i]
        x = pixels(path, self.scaled).float() / 255
        return (x.flip(2) if torch.rand(()) < 0.5 else x), label


def prepare(row: tuple[Path, int]) -> tuple[torch.Tensor, int]:
    return pixels(row[0]), row[1]


def augment(batch: Any) -> Any:
    images, labels = batch
    flip = torch.rand(len(images)) < 0.5
    images = torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)
    return stoker.empty(images.shape).copy_(images).div_(255), labels


class Rows(Dataset):
    def __init__(self) -> None:
        self.rows = files()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Path, int]:
        return self.rows[i]


class Lru(Dataset):
    """An LRU of prepared samples, of so many."""

    def __init__(self, size: int) -> None:
        self.rows, self.size = files(), size
        self.kept: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        if i in self.kept:
            self.kept.move_to_end(i)
            return self.kept[i]
        if len(self.kept) >= self.size:
            self.kept.popitem(last=False)
        self.kept[i] = prepare(self.rows[i])
        return self.kept[i]


def epoch(loader: Any) -> float:
    """Images a second over one epoch."""
    n, began = 0, time.perf_counter()
    for images, _ in loader:
        n += len(images)
    return n / (time.perf_counter() - began)


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def bare_rates() -> Iterator[float]:
    """Images a second of one thread, everything in memory, an epoch each."""
    torch.set_num_threads(1)
    n = len(files())
    table = torch.randint(0, 256, (n, 3, 64, 64), dtype=torch.uint8)
    small, large = torch.empty((BATCH, 3, 64, 64), dtype=torch.uint8), torch.empty((BATCH, 3, 64, 64))
    for _ in range(EPOCHS):
        order, began = torch.randperm(n), time.perf_counter()
        for rows in order.split(BATCH):
            if len(rows) < BATCH:
                continue
            torch.index_select(table, 0, rows, out=small)
            flip = torch.rand(BATCH) < 0.5
            small[flip] = small[flip].flip(3)
            large.copy_(small).div_(255)
        yield n // BATCH * BATCH / (time.perf_counter() - began)


def bare() -> None:
    for rate in bare_rates():
        say(epoch="later", rate=rate)


def lazy(cls: type, workers: int, **settings: Any) -> None:
    data = Photos(scaled=settings.pop("scaled", False))
    loader = cls(data, batch_size=BATCH, shuffle=True, num_workers=workers, **settings)
    say(epoch="first", rate=epoch(loader))


def staged(workers: int) -> None:
    data = stoker.Staged(Rows(), prepare=prepare, augment_batch=augment, cache_budget="1GB")
    loader = stoker.DataLoader(
        data, batch_size=BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    say(epoch="first", rate=epoch(loader), filled=data.account.filled)
    for _ in range(EPOCHS):
        say(epoch="later", rate=epoch(loader))


def tight(kind: str) -> None:
    """A set three times the budget, in one process."""
    rows, each = Rows(), 3 * 64 * 64 + 8
    share = len(rows) // 3
    if kind == "lru":
        data: Any = Lru(share)
    else:
        cache: dict[str, Any] = {"cache_budget": share * each} if kind == "staged" else {"cache": None}
        data = stoker.Staged(rows, prepare=prepare, **cache)
    loader = stoker.DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=0)
    say(epoch="first", rate=epoch(loader))
    for _ in range(2):
        account = {"filled": data.account.filled, "bytes": data.account.nbytes} if kind == "staged" else {}
        say(epoch="later", rate=epoch(loader), budget=share * each, **account)


class Pictures(Dataset):
    """What Pillow makes of a photograph for most models: 224x224 of uint8. Nothing is read, nothing drawn."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        x = torch.full((64, 64), float(i))
        for _ in range(20):  # as long as a small photograph takes
            x = (x @ x).sin()
        return (x[:1].repeat(3, 224, 4)[:, :, :224] * 255).to(torch.uint8), i


def serve(is_cached: bool) -> None:
    """Samples a second that a training script's own process gets one by one."""
    torch.set_num_threads(1)
    pictures = Pictures()
    data: Any = stoker.Staged(pictures, cache_budget="200MB")
    if not is_cached:
        data = [pictures[i][0] for i in range(len(pictures))]
    for epoch_ in range(EPOCHS + 1):
        order, began = torch.randperm(len(pictures)).tolist(), time.perf_counter()
        for i in order:
            sample = data[i] if is_cached else data[i].clone()
            del sample
        say(epoch="later" if epoch_ else "first", rate=len(order) / (time.perf_counter() - began))


PAIRED = ("torch, 1 worker", "staged, 1 worker", "stoker, 1 worker")


def first() -> None:
    """First epochs only, seven rounds: what filling costs."""
    lines = []
    for line in in_turns("staging", "contestant", PAIRED, 7, "first"):
        print(json.dumps(line), flush=True)
        lines.append(line)
    for other in (PAIRED[0], PAIRED[2]):
        ratios = in_pairs(lines, PAIRED[1], other)
        print(f"first epoch against {other}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def one(name: str, only: str = "") -> None:
    global EPOCHS
    EPOCHS = 0 if only else EPOCHS
    CONTESTANTS[name]()


CONTESTANTS = {
    "torch, 1 worker": lambda: lazy(DataLoader, 1),
    "staged, 1 worker": lambda: staged(1),  # its first epoch is compared with its neighbours in time
    "stoker, 1 worker": lambda: lazy(stoker.DataLoader, 1),
    "stoker, 1 worker, scaled decode": lambda: lazy(stoker.DataLoader, 1, scaled=True),
    "staged, 0 workers": lambda: staged(0),
    "staged, 2 workers": lambda: staged(2),
    "bare": bare,
    "third: lazy": lambda: tight("lazy"),
    "third: staged": lambda: tight("staged"),
    "third: LRU": lambda: tight("lru"),
    "serve: cached": lambda: serve(True),
    "serve: copied from a list": lambda: serve(False),
}


def median(lines: list[dict[str, Any]], name: str, epoch_: str) -> float:
    rates = [x["rate"] for x in lines if x.get("contestant") == name and x["epoch"] == epoch_]
    return statistics.median(rates) if rates else float("nan")


def in_pairs(lines: list[dict[str, Any]], name: str, against: str) -> list[float]:
    """First epochs, each against its neighbour in the same round: what the machine does in the long run falls out."""

    def rates(contestant: str) -> dict[int, float]:
        return {x["round"]: x["rate"] for x in lines if x["contestant"] == contestant and x["epoch"] == "first"}

    ours, theirs = rates(name), rates(against)
    return [ours[r] / theirs[r] for r in ours.keys() & theirs.keys()]


def table(lines: list[dict[str, Any]]) -> str:
    out = ["| contestant | first epoch, images/s | later epochs, images/s |", "|---|---|---|"]
    for name in CONTESTANTS:
        first, later = median(lines, name, "first"), median(lines, name, "later")
        out.append(f"| {name} | {first:,.0f} | {later:,.0f} |".replace("nan", ""))
    torch_1, stoker_1 = median(lines, "torch, 1 worker", "first"), median(lines, "stoker, 1 worker", "first")
    best = max(median(lines, name, "later") for name in CONTESTANTS if name.startswith("staged"))
    tight_, plain = median(lines, "third: staged", "later"), median(lines, "third: lazy", "later")
    checks = [
        ("later epochs, the best of staged, against torch's lazy one", best / torch_1, 60),
        ("later epochs, the best of staged, against the bare loop", best / median(lines, "bare", "later"), 0.8),
        (
            "first epoch against torch's lazy one, 1 worker",
            statistics.median(in_pairs(lines, PAIRED[1], PAIRED[0])),
            1 / 1.05,
        ),
        ("first epoch against stoker's lazy one", statistics.median(in_pairs(lines, PAIRED[1], PAIRED[2])), 1 / 1.05),
        ("three times the budget, against lazy", tight_ / plain, 0.9 / (1 - 1 / 3)),
        ("scaled decode against lazy", median(lines, "stoker, 1 worker, scaled decode", "first") / stoker_1, 3),
    ]
    served, copied = (1e6 / median(lines, f"serve: {how}", "later") for how in ("cached", "copied from a list"))
    if served > 0:  # older results have no such rows
        out += ["", f"A sample of 150 KB alone: {served:.1f} us from the cache, {copied:.1f} us copied from a list."]
    out += ["", "| ratio | measured | at least | |", "|---|---|---|---|"]
    out += [f"| {n} | {x:.2f} | {y:.2f} | {'ok' if x >= y else 'missed'} |" for n, x, y in checks]
    return "\n".join(out)


def measure(rounds: int) -> Iterator[Line]:
    if not (DATA / "labels.csv").is_file():
        raise SystemExit("no photographs: python examples/make_photos.py --out examples/data")
    return in_turns("staging", "contestant", CONTESTANTS, rounds)


if __name__ == "__main__":
    sys.exit(main("staging", __doc__, measure, table, one, 5, first=first))
