"""One measurement in a process of its own: ``python -m benchmarks.measure WORKLOAD CONTESTANT`` prints JSON lines."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import resource
import statistics
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

import stoker
from stoker.core import resources

from . import limits
from . import workloads as w

RESTARTS = 6  # epochs that workers who stay begin anew
LOADERS = {"torch": TorchLoader, "stoker": stoker.DataLoader}


def emit(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def epochs(loader: Any, n: int, device: str | None = None) -> list[tuple[float, int, int]]:
    """Seconds, batches and samples of ``n`` epochs of a plain for loop."""
    out = []
    for _ in range(n):
        gc.collect()
        batches = samples = 0
        began = time.perf_counter()
        for batch in loader:
            if device is not None:
                batch = [t.to(device, non_blocking=True) for t in (batch if isinstance(batch, list) else [batch])]
                samples += len(batch[0])
            else:
                samples += w.touch(batch)
            batches += 1
        if device is not None:
            torch.cuda.synchronize()
        out.append((time.perf_counter() - began, batches, samples))
    return out


def loop(name: str, contestant: str, quick: bool, device: str | None = None) -> None:
    """transport, overhead, leaves, ragged or jpeg: one line an epoch and a way of keeping workers."""
    pin = {"pin_memory": True} if device is not None else {}
    for persistent in (False, True):
        kw: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent, **pin}
        if name == "transport":
            dataset: Any = w.Big()
            kw["batch_size"] = 256
        elif name == "overhead":
            dataset = w.Tiny(100 if quick else 2000)
            kw["batch_size"] = 64
        elif name == "leaves":
            dataset = w.Leaves(20 if quick else 100)
            kw["batch_size"] = 32
        elif name == "ragged":
            dataset = w.Ragged(100 if quick else 1000)
            kw.update(batch_size=64, collate_fn=w.as_it_is)
        else:
            dataset = w.Photos(w.photos())
            kw.update(batch_size=100, shuffle=True)
        loader = LOADERS[contestant](dataset, **kw)
        for epoch, (s, batches, samples) in enumerate(epochs(loader, 2 if quick or name == "jpeg" else 3, device), 1):
            rate = {"transport": batches * w.BATCH_BYTES / s / 1e9, "jpeg": samples / s}.get(name, batches / s)
            emit(
                metric=f"{name}{' persistent' if persistent else ''}",
                epoch=epoch,
                value=rate,
                seconds=s,
                batches=batches,
            )
        if name == "transport" and persistent:
            for epoch in (1, 2, 3):
                began = time.perf_counter()
                batches = sum(1 for _ in loader)
                s = time.perf_counter() - began
                emit(metric="transport unread", epoch=epoch, value=batches * w.BATCH_BYTES / s / 1e9, seconds=s)
        del loader
        if name == "jpeg":
            return


def startup(contestant: str, quick: bool) -> None:
    """Construct to first batch, and epoch restart to first batch, in milliseconds."""
    cases = [("fork", False, 2), ("fork", True, 2), ("spawn", False, 1), ("spawn", False, 4), ("forkserver", False, 4)]
    dataset = w.Tiny(100)
    for context, persistent, workers in cases[: 2 if quick else None]:
        label = f"{context}{' persistent' if persistent else ''}, {workers} workers"
        gc.collect()  # else one that happens to be due runs in each worker of torch's, 100 ms
        began = time.perf_counter()
        loader = LOADERS[contestant](
            dataset, batch_size=64, num_workers=workers, multiprocessing_context=context, persistent_workers=persistent
        )
        it = iter(loader)
        next(it)
        emit(metric=f"startup {label}: first batch", epoch=1, value=(time.perf_counter() - began) * 1e3)
        for _ in it:
            pass
        if not persistent:
            gc.collect()
        for epoch in range(1, RESTARTS + 1) if persistent else (1,):
            began = time.perf_counter()
            it = iter(loader)
            next(it)
            ms = (time.perf_counter() - began) * 1e3
            emit(metric=f"startup {label}: restart", epoch=epoch, value=ms)
            if persistent and epoch == 1:  # in memory that nobody has touched since the fork
                emit(metric=f"startup {label}: first restart", epoch=1, value=ms)
            for _ in it:
                pass
        del it, loader


def shuffle(contestant: str, quick: bool) -> None:
    """A shuffled epoch over very many samples: milliseconds to the first batch, megabytes that the peak grows by."""
    n = 10**6 if quick else 10**8
    orders: list[tuple[str, bool | str]] = [("feistel", "feistel"), ("torch's order", True)]
    for _, order in orders if contestant == "stoker" else orders[1:]:
        next(iter(LOADERS[contestant](w.Endless(70_000), batch_size=64, shuffle=order)))  # loads what is loaded lazily
    for label, order in orders:
        if contestant == "torch" and label == "feistel":
            continue
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        it = iter(LOADERS[contestant](w.Endless(n), batch_size=64, shuffle=order))
        next(it)
        ms = (time.perf_counter() - began) * 1e3
        mb = max(0.1, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024)
        # torch has no other order than its own to compare a keyed one with.
        for name in (label,) if contestant == "stoker" else [name for name, _ in orders]:
            emit(metric=f"shuffle {name}: first batch", epoch=1, value=ms)
            emit(metric=f"shuffle {name}: memory", epoch=1, value=mb)
        del it


def indices(contestant: str, quick: bool) -> None:
    """Microseconds for the indices of a batch of 64, in the middle of a shuffled epoch over 10^7 samples."""
    n = 10**5 if quick else 10**7
    for label, order in (("torch's order", True), ("feistel", "feistel")):
        shuffle: Any = order if contestant == "stoker" else True
        it: Any = iter(LOADERS[contestant](w.Endless(n), batch_size=64, shuffle=shuffle))
        next(it)
        began = time.perf_counter()
        for _ in range(1000):
            next(it._sampler_iter)
        emit(metric=f"indices {label}: 64 of them", epoch=1, value=(time.perf_counter() - began) * 1e3)


def rows(contestant: str, quick: bool) -> None:
    """Batches a second of a table in memory, shuffled."""
    n = 10**5 if quick else 10**6
    dataset = TensorDataset(torch.randn(n, 32), torch.arange(n))
    for workers in (0, 2):
        loader = LOADERS[contestant](dataset, batch_size=1024, shuffle=True, num_workers=workers)
        for epoch, (s, batches, _) in enumerate(epochs(loader, 2), 1):
            emit(metric=f"rows {workers} workers", epoch=epoch, value=batches / s, seconds=s, batches=batches)


def stragglers(contestant: str, quick: bool) -> None:
    """Batches a second where 5 % of samples take 20 times as long; the order is checked."""
    dataset = w.Uneven(200 if quick else 1500)
    kw: dict[str, Any] = {"batch_size": 1, "num_workers": 2}
    if contestant == "stoker":
        kw["num_workers"] = "auto"  # tasks are then given to whoever is free
    loader = LOADERS[contestant](dataset, **kw)
    if contestant == "stoker":
        loader.resize(2)
    for epoch in (1, 2):
        began = time.perf_counter()
        order = [int(batch) for batch in loader]
        s = time.perf_counter() - began
        assert order == list(range(len(dataset)))
        emit(metric="stragglers", epoch=epoch, value=len(order) / s, seconds=s, batches=len(order))


def auto(contestant: str, quick: bool) -> None:
    """``num_workers="auto"`` against torch's 0 workers: batches a second after the epoch in which it decides."""
    for name, dataset in (
        ("overhead", w.Tiny(100 if quick else 2000)),
        ("rows", TensorDataset(torch.randn(10**6, 32))),
    ):
        kw: dict[str, Any] = {"batch_size": 64 if name == "overhead" else 1024}
        loader = LOADERS[contestant](dataset, num_workers="auto" if contestant == "stoker" else 0, **kw)
        for epoch, (s, batches, _) in enumerate(epochs(loader, 3), 1):
            emit(metric=f"{name} auto against 0 workers", epoch=epoch, value=batches / s, seconds=s, batches=batches)


def memory(contestant: str, quick: bool) -> None:
    """Megabytes (PSS) of the whole tree near the end of a shuffled epoch over many small dicts, 4 forked workers."""
    import psutil

    rows: Any = [{"p": f"img/{i:08d}.jpg", "y": i} for i in range(20_000 if quick else 2_000_000)]
    if contestant == "stoker":
        rows = stoker.share(rows)
        gc.collect()
    loader = LOADERS[contestant](w.Table(rows), batch_size=1000, num_workers=4, shuffle=True)
    me, near = psutil.Process(), len(loader) - 10
    for i, _ in enumerate(loader):
        if i == near:  # all workers are there
            tree = [os.getpid(), *(p.pid for p in me.children(recursive=True))]
            emit(metric="memory: 2,000,000 dicts", epoch=1, value=sum(resources.pss(pid) for pid in tree) / 1e6)


def resize(contestant: str, quick: bool) -> None:
    """1 -> 4 -> 2 workers within an epoch: whether the bits are those of a fixed count, and the longest pause at a
    resize in batch times, which is what one worker takes for a batch."""
    if contestant == "torch":
        return  # torch's loader cannot do it
    dataset = w.Distant(60 if quick else 300)

    def run(changes: dict[int, int]) -> tuple[torch.Tensor, list[float], list[float]]:
        torch.manual_seed(1)
        loader = stoker.DataLoader(dataset, batch_size=4, num_workers="auto", shuffle=True)
        loader.resize(1)
        out, pauses, usual = [], [], []
        at = time.perf_counter()
        for i, batch in enumerate(loader):
            took, at = time.perf_counter() - at, time.perf_counter()
            near = any(0 <= i - change <= 4 for change in changes)
            (pauses if near else usual).append(took)
            out.append(batch.clone())
            if i in changes:
                loader.resize(changes[i])
        return torch.cat(out), pauses, usual[2:]

    n = len(dataset) // 4
    fixed, _, alone = run({})
    moved, pauses, _ = run({n // 4: 4, n // 2: 2})
    assert torch.equal(fixed, moved), "resizing changed the batches"
    emit(metric="resize 1 -> 4 -> 2: longest pause", epoch=1, value=max(pauses) / statistics.median(alone))


def state(contestant: str, quick: bool) -> None:
    """Microseconds (median) of ``state_dict()`` after each step of a shuffled epoch; while the script draws no random
    numbers, and while it does. With 2 workers, and with none over 10^10 samples."""
    if contestant == "torch":
        return  # torch's loader has none
    n = 100 if quick else 1000
    loaders: dict[str, Any] = {
        "": lambda: stoker.DataLoader(w.Tiny(n), batch_size=64, shuffle=True, num_workers=2),
        "10^10 samples, ": lambda: stoker.DataLoader(w.Endless(10**10), batch_size=64, shuffle="feistel"),
    }
    for long, make in loaders.items():
        for label, draws in (("script draws nothing", False), ("script draws", True)):
            loader, took = make(), []
            for _ in itertools.islice(loader, n):
                if draws:
                    torch.rand(())
                began = time.perf_counter()
                loader.state_dict()
                took.append(time.perf_counter() - began)
            emit(
                metric=f"state {long}{label}: state_dict() after each step",
                epoch=1,
                value=statistics.median(took) * 1e6,
            )


def staged(contestant: str, quick: bool) -> None:
    """Photographs prepared once against torch decoding them in every epoch with one worker: the epoch that fills the
    cache, with one worker, too, and those after it, with two that stay."""
    from . import staging as s

    first, later = "staged: first epoch", "staged: later epochs"
    if contestant == "torch":
        rate = s.epoch(TorchLoader(s.Photos(), batch_size=s.BATCH, shuffle=True, num_workers=1))
        for metric in (first, later):
            emit(metric=metric, epoch=1, value=rate)
        return
    for metric, workers in ((first, 1), (later, 2)):
        data = stoker.Staged(s.Rows(), prepare=s.prepare, augment_batch=s.augment, cache_budget="1GB")
        loader = stoker.DataLoader(data, batch_size=s.BATCH, shuffle=True, num_workers=workers, persistent_workers=True)
        for epoch in range(1, 2 if metric == first else s.EPOCHS + 2):
            emit(metric=metric, epoch=epoch, value=s.epoch(loader))


LOOPS = ("jpeg", "transport", "overhead", "leaves", "ragged")
OTHERS = {
    "staged": staged,
    "startup": startup,
    "shuffle": shuffle,
    "indices": indices,
    "rows": rows,
    "stragglers": stragglers,
    "auto": auto,
    "memory": memory,
    "resize": resize,
    "state": state,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=[*LOOPS, *OTHERS])
    parser.add_argument("contestant", choices=["stoker", "torch", "limit"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device")
    a = parser.parse_args()
    if a.contestant == "limit":
        for metric, value in limits.LIMITS[a.workload]().items():
            emit(metric=metric, epoch=1, value=value)
    elif a.workload in OTHERS:
        OTHERS[a.workload](a.contestant, a.quick)
    else:
        loop(a.workload, a.contestant, a.quick, a.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
