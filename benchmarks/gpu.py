"""With a device: ``python -m benchmarks gpu`` runs these, each contestant in its own process, in under 8 minutes."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader

import stoker

from . import workloads as w

MB = 1 << 20
SIZES = (16 * MB, 64 * MB, 147 * MB)


class Blocks(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of some bytes that cost nothing to make."""

    def __init__(self, n: int, nbytes: int) -> None:
        self.n, self.block = n, torch.ones(nbytes, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.block


def emit(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def loader_of(contestant: str, dataset: Any, **settings: Any) -> Any:
    made = {"torch": TorchLoader, "stoker": stoker.DataLoader}[contestant]
    return made(dataset, pin_memory=True, persistent_workers=True, **settings)


def peak(nbytes: int) -> float:
    """GB/s of copies from one page-locked tensor."""
    source = torch.ones(nbytes, dtype=torch.uint8).pin_memory()
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return nbytes / statistics.median(times) / 1e9


def copies(contestant: str) -> None:
    """GB/s of one batch's copy, as it comes out of the loader, against the peak in the same process."""
    for nbytes in SIZES:
        loader = loader_of(contestant, Blocks(8 * 16, nbytes // 16), batch_size=16, num_workers=2)
        best = peak(nbytes)
        for _ in range(2):
            rates = []
            for x in loader:
                torch.cuda.synchronize()
                began = time.perf_counter()
                x.to("cuda", non_blocking=True)
                torch.cuda.synchronize()
                rates.append(nbytes / (time.perf_counter() - began) / 1e9)
        emit(metric=f"copy of {nbytes // MB} MiB, part of the peak", value=statistics.median(rates) / best, peak=best)
        del loader, x


def transport(contestant: str) -> None:
    """GB/s from workers to the device, and this process' CPU time for each batch."""
    loader = loader_of(contestant, w.Big(), batch_size=256, num_workers=8)
    for epoch in (1, 2, 3):
        began, cpu, batches = time.perf_counter(), time.process_time(), 0
        for batch in loader:
            for t in batch if isinstance(batch, list) else [batch]:
                t.to("cuda", non_blocking=True)
            batches += 1
        torch.cuda.synchronize()
        s = time.perf_counter() - began
        emit(metric="transport, 8 workers, GB/s", epoch=epoch, value=batches * w.BATCH_BYTES / s / 1e9)
        cpu_ms = (time.process_time() - cpu) / batches * 1e3
        emit(metric="CPU of the main process, ms a batch", epoch=epoch, value=cpu_ms)


def starved(contestant: str) -> None:
    """Part of the time in which the device has nothing to do, where a step takes twice as long as making a batch."""
    loader = loader_of(contestant, Blocks(4000, MB), batch_size=16, num_workers=8)
    if contestant == "stoker":
        loader = stoker.to_device(loader, "cuda")
    batches = 0
    began = time.perf_counter()
    for batch in loader:
        batch.to("cuda", non_blocking=True)
        batches += 1
    torch.cuda.synchronize()
    each = (time.perf_counter() - began) / batches
    rate = _cycles_per_s()
    gaps: list[tuple[Any, Any]] = []
    began = time.perf_counter()
    for batch in loader:
        batch.to("cuda", non_blocking=True)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        torch.cuda._sleep(int(2 * each * rate))
        last.record()
        gaps.append((first, last))
    torch.cuda.synchronize()
    busy = sum(a.elapsed_time(b) for a, b in gaps) / 1e3
    total = gaps[0][0].elapsed_time(gaps[-1][1]) / 1e3
    emit(metric="starved, part of the time", value=max(0.0, 1 - busy / total), step_ms=2e3 * each)


def _cycles_per_s() -> float:
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1000)
    a.record()
    torch.cuda._sleep(50_000_000)
    b.record()
    torch.cuda.synchronize()
    return 50_000_000 / a.elapsed_time(b) * 1e3


ROWS = {"copies": copies, "transport": transport, "starved": starved}


TARGETS = {"copy of": "stoker 0.95 or more", "transport, 8": "ratio 2 or more", "starved": "stoker below 0.01"}
TARGETS |= {"CPU of": "ratio 0.33 or less"}


def table(lines: list[dict[str, Any]], markdown: bool = False) -> str:
    """Medians of all rounds, warm epochs only; ratio is stoker's by torch's."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        if "metric" in line and line.get("epoch", 2) > 1:
            found.setdefault(line["metric"], {}).setdefault(line["contestant"], []).append(line["value"])
    row = "| {} | {} | {} | {} | {} |" if markdown else "{:40} {:>10} {:>10} {:>7}  {}"
    out = [
        row.format("", "stoker", "torch", "ratio", "wanted"),
        *(["| --- | --- | --- | --- | --- |"] if markdown else []),
    ]
    for metric, by in found.items():
        ours, theirs = (statistics.median(by[c]) if c in by else float("nan") for c in ("stoker", "torch"))
        wanted = next((words for name, words in TARGETS.items() if metric.startswith(name)), "")
        ratio = ours / theirs if theirs else 0
        out.append(row.format(metric, f"{ours:.4g}", f"{theirs:.4g}", f"{ratio:.3g}", wanted).rstrip())
    return "\n".join([*out, *(f"failed: {line['failed'][-300:]}" for line in lines if "failed" in line)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", choices=list(ROWS))
    parser.add_argument("contestant", choices=["stoker", "torch"])
    a = parser.parse_args()
    ROWS[a.row](a.contestant)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
