"""The numbers logged while a training runs, computed from the watch's counters. docs/loggers.md explains each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..core.metrics import LoaderMetrics
from ..diagnosis.doctor.verdict import diagnose
from ..diagnosis.report.merge import Snapshot, merged

PREFIX = "data/"
VERDICT = PREFIX + "verdict"
RANK = PREFIX + "wait_rank"
CODES = {"unknown": -1, "healthy": 0, "input-bound": 1, "transfer-bound": 2}  # verdicts for loggers that take no text
VERDICTS = {code: verdict for verdict, code in CODES.items()}


class Totals(NamedTuple):
    """What one loader did since it was first watched. ``workers`` is its current number of workers."""

    wait_s: float = 0.0
    step_s: float = 0.0
    batches: int = 0
    samples: int = 0
    made_s: float = 0.0
    failed: int = 0
    workers: int = 0

    @property
    def loop_s(self) -> float:
        return self.wait_s + self.step_s

    def plus(self, other: Totals) -> Totals:
        """Adds the totals of the same loader in another process of the same rank."""
        added = Totals(*(a + b for a, b in zip(self, other, strict=True)))  # type: ignore[arg-type]
        return added._replace(workers=max(self.workers, other.workers))

    def since(self, before: Totals | None) -> Totals:
        more = Totals(*(a - b for a, b in zip(self, before or Totals(), strict=True)))  # type: ignore[arg-type]
        return more._replace(workers=self.workers)


class Numbers(NamedTuple):
    """The numbers that are logged; their names lack the prefix ``data/``. NaN means not seen."""

    wait_pct: float = math.nan
    wait_s: float = math.nan
    samples_per_s: float = math.nan
    workers: float = math.nan
    worker_busy_pct: float = math.nan
    failed_samples: float = math.nan


MEANINGS = {
    "wait_pct": "Share of its time that the loop waited for data, in percent",
    "wait_s": "Seconds that the loop waited for a batch",
    "samples_per_s": "Samples per second of the loop, waiting included",
    "workers": "Worker processes or threads of the loader",
    "worker_busy_pct": "Share of the loop's time that a worker was making batches, in percent",
    "failed_samples": "Samples that could not be loaded and were skipped, since the start",
    "verdict": "Verdict on the whole run: " + ", ".join(f"{code} {name}" for name, code in CODES.items()),
}


def totals(loaders: Iterable[LoaderMetrics]) -> dict[str, Totals]:
    """Returns the totals of each loader, by name."""
    out = {}
    for m in loaders:
        made_s = (m.fetch_ns + m.collate_ns + m.transport_ns) / 1e9
        failed, workers = int(m.faults.get("samples", 0)), int(m.settings.get("num_workers") or 0)
        out[m.name] = Totals(m.wait_s, m.step_s, m.batches, m.samples, made_s, failed, workers)
    return out


def numbers(spent: Totals, failed: int) -> Numbers:
    """Computes the numbers for a span in which a loader did ``spent``. ``failed`` counts samples since its start.

    Example:
        >>> numbers(Totals(wait_s=1, step_s=3, batches=10, samples=80, made_s=6, workers=2), 0)
        Numbers(wait_pct=25.0, wait_s=0.1, samples_per_s=20.0, workers=2, worker_busy_pct=75.0, failed_samples=0)
    """
    loop_s = spent.loop_s
    if not spent.batches or loop_s <= 0:
        return Numbers(samples_per_s=0.0, workers=spent.workers, failed_samples=failed)
    busy = math.nan
    if spent.workers and spent.made_s:
        busy = min(100.0, 100 * spent.made_s / spent.workers / loop_s)  # above 100 if prefetched batches finish here
    return Numbers(
        100 * spent.wait_s / loop_s, spent.wait_s / spent.batches, spent.samples / loop_s, spent.workers, busy, failed
    )


def between(before: Mapping[str, Totals], now: Mapping[str, Totals]) -> Numbers | None:
    """Returns the numbers of the loader whose loop took most of the time in between; None if no batch came."""
    spent = [each for name, total in now.items() if (each := total.since(before.get(name))).batches]
    if not spent:
        return None
    return numbers(max(spent, key=lambda each: each.loop_s), sum(total.failed for total in now.values()))


def verdict(processes: Sequence[Snapshot]) -> str:
    """Returns the verdict on all that these processes did so far."""
    cuda = any(process.cuda for process in processes)
    cores = max((process.cores for process in processes if process.cores), default=1)
    return diagnose(merged(processes), cores, cuda)[0]


def combined(rows: Sequence[Sequence[float]]) -> dict[str, float | str]:
    """Combines the rows of all ranks, each with its numbers and its verdict's code, into what is logged.

    ``samples_per_s`` and ``failed_samples`` are sums, the others maxima. ``wait_rank`` and the verdict belong to the
    rank that waits longest. Empty if no rank saw a batch."""
    seen = {rank: Numbers(*row[:-1]) for rank, row in enumerate(rows) if not math.isnan(row[0])}
    if not seen:
        return {}
    worst = max(seen, key=lambda rank: seen[rank].wait_pct)
    out: dict[str, float | str] = {}
    for key, column in zip(Numbers._fields, zip(*seen.values(), strict=True), strict=True):
        known = [x for x in column if not math.isnan(x)]
        if known:
            out[PREFIX + key] = sum(known) if key in ("samples_per_s", "failed_samples") else max(known)
    if len(rows) > 1:
        out[RANK] = worst
    out[VERDICT] = VERDICTS[int(rows[worst][-1])]
    return out
