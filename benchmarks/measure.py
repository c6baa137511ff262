"""One measurement in a process of its own: ``python -m benchmarks.measure WORKLOAD CONTESTANT`` prints JSON lines."""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import resource
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

import stoker

from . import workloads as w

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
        del loader
        if name == "jpeg":
            return


def startup(contestant: str, quick: bool) -> None:
    """Construct to first batch, and epoch restart to first batch, in milliseconds."""
    cases = [("fork", False), ("fork", True), ("spawn", False), ("forkserver", False)]
    dataset = w.Tiny(100)
    for context, persistent in cases[: 2 if quick else None]:
        label = f"{context}{' persistent' if persistent else ''}"
        began = time.perf_counter()
        loader = LOADERS[contestant](
            dataset, batch_size=64, num_workers=2, multiprocessing_context=context, persistent_workers=persistent
        )
        it = iter(loader)
        next(it)
        emit(metric=f"startup {label}: first batch", epoch=1, value=(time.perf_counter() - began) * 1e3)
        for _ in it:
            pass
        began = time.perf_counter()
        it = iter(loader)
        next(it)
        emit(metric=f"startup {label}: restart", epoch=1, value=(time.perf_counter() - began) * 1e3)
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


def rows(contestant: str, quick: bool) -> None:
    """Batches a second of a table in memory, shuffled."""
    n = 10**5 if quick else 10**6
    dataset = TensorDataset(torch.randn(n, 32), torch.arange(n))
    for workers in (0, 2):
        loader = LOADERS[contestant](dataset, batch_size=1024, shuffle=True, num_workers=workers)
        for epoch, (s, batches, _) in enumerate(epochs(loader, 2), 1):
            emit(metric=f"rows {workers} workers", epoch=epoch, value=batches / s, seconds=s, batches=batches)


def limit() -> None:
    """transport without a loader: two bare processes that stack into shared memory they use again and again."""
    dataset = w.Big()
    memory = [mmap.mmap(-1, w.BATCH_BYTES) for _ in range(2)]
    pipes = [os.pipe() for _ in range(2)]
    rounds = 24
    pids = []
    for m, (_, write) in zip(memory, pipes, strict=True):
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            out = torch.frombuffer(m, dtype=torch.float32).view(256, *w.SAMPLE)
            samples = [dataset[i] for i in range(256)]
            torch.stack(samples, 0, out=out)
            began = time.perf_counter()
            for _ in range(rounds):
                torch.stack(samples, 0, out=out)
            os.write(write, json.dumps(time.perf_counter() - began).encode())
            os._exit(0)
        pids.append(pid)
    seconds = [float(os.read(read, 100)) for read, _ in pipes]
    for pid in pids:
        os.waitpid(pid, 0)
    emit(metric="transport limit", epoch=1, value=2 * rounds * w.BATCH_BYTES / max(seconds) / 1e9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "workload", choices=["jpeg", "transport", "overhead", "leaves", "ragged", "startup", "shuffle", "rows"]
    )
    parser.add_argument("contestant", choices=["stoker", "torch", "limit"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device")
    a = parser.parse_args()
    if a.contestant == "limit":
        limit()
    elif a.workload == "startup":
        startup(a.contestant, a.quick)
    elif a.workload == "shuffle":
        shuffle(a.contestant, a.quick)
    elif a.workload == "rows":
        rows(a.contestant, a.quick)
    elif a.workload not in ("jpeg", "transport", "overhead", "leaves", "ragged"):
        parser.error(f"unknown workload {a.workload!r}")
    else:
        loop(a.workload, a.contestant, a.quick, a.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
