"""Merges what the watched processes sent: one ``LoaderReport`` for each line of code that created loaders."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec
from msgspec import Struct

from ...core.histogram import Histogram
from ...core.metrics import LoaderMetrics
from ...core.types import JsonObject
from ..watch import worker_record
from . import schema

LINES = 12  # most lines of code in the report, per loader
WHOLE = 0.9  # of the longest epoch's batches; a shorter epoch was left early, or belongs to another loader
SUMS = (
    "wait_s", "first_wait_s", "step_s", "step_cpu_s", "between_s", "loop_s",
    "batches", "samples", "epochs", "ended", "made", "at_once",
    "tasks", "fetch_ns", "collate_ns", "transport_ns", "cpu_ns",
    "gaps", "gap_s", "gap_wait_s", "crossing_steps", "crossing_s", "pinned_bytes",
)  # fmt: skip
SAME = (
    "name", "batches", "samples", "epochs", "ended", "made", "at_once", "wait_s", "step_s", "between_s",
    "filled_epochs", "over_time",
)  # fmt: skip


class Snapshot(Struct):
    """What one watched process sends (``watch.ProcessWatch.snapshot``)."""

    pid: int = 0
    final: bool = False
    rank: int = 0
    world: int = 1
    cores: int | None = None
    memory: int | None = None
    memory_available_min: int | None = None
    shm_free_min: int | None = None
    cuda: bool = False
    cuda_visible: str | None = None
    threads: int = 1
    loaders: list[LoaderMetrics] = []
    applied: dict[str, schema.AppliedSettings] = {}
    bypassing: list[schema.Bypassing] = []


def snapshots(sent: Iterable[JsonObject]) -> list[Snapshot]:
    """Converts snapshots to their type. Unknown keys are ignored, since another version of stoker may have sent them.
    Numbers may be strings, because ``json.dumps(..., default=str)`` writes NumPy scalars so."""
    return [msgspec.convert(s, Snapshot, str_keys=True, strict=False) for s in sent]


def merged(processes: Iterable[Snapshot]) -> list[schema.LoaderReport]:
    """Returns the loaders of all processes. Loaders created by one line share an entry, summed over all processes."""
    by_name: dict[str, list[LoaderMetrics]] = {}
    threads = 1
    for process in processes:
        threads = max(threads, process.threads)
        for metrics in process.loaders:
            if metrics.epochs:
                by_name.setdefault(metrics.name, []).append(metrics)
    return [_entry(each, threads) for each in by_name.values()]


def _entry(each: Sequence[LoaderMetrics], threads: int) -> schema.LoaderReport:
    """Makes one entry of the report from a loader's metrics in several processes."""
    m = replace(each[0], **{key: sum(getattr(one, key) for one in each) for key in SUMS})
    # If a process was killed, only waits and steps of its last batches are known, from shared memory.
    loop_s = max(m.loop_s, m.wait_s + m.step_s)
    settings = msgspec.convert(m.settings, schema.LoaderSettings, strict=False)
    settings.threads, settings.processes = threads, len(each)
    records = [one.inside for one in each if one.inside]
    inside = worker_record.merge(records) if records else worker_record.EMPTY
    samplings = sum(ran + waited for *_, ran, waited in inside["stacks"])
    tasks = _spread([inside["bins"]])
    by_epoch = msgspec.convert(m.by_epoch, list[schema.EpochRow])
    return schema.LoaderReport(
        **{key: getattr(m, key) for key in SAME},
        loop_s=loop_s,
        samples_per_s=m.samples / loop_s * len(each) if loop_s else 0.0,
        settings=settings,
        stages=schema.Stages(
            fetch=schema.Stage(self_s=m.fetch_ns / 1e9),
            collate=schema.Stage(self_s=m.collate_ns / 1e9),
            transport=schema.Stage(self_s=m.transport_ns / 1e9),
            worker=schema.Stage(cpu_s=m.cpu_ns / 1e9, tasks=m.tasks),
            consumer=schema.Stage(cpu_s=m.step_cpu_s),
            startup=schema.Stage(wait_s=m.first_wait_s),
        ),
        memory=schema.Memory(
            worker_pss=[pss for one in each for pss in one.worker_pss.values()],
            batch_bytes=m.batch_bytes,
            own=inside["own"],
        ),
        decisions=[line for one in each for line in one.decisions],
        steps=_spread(one.step_bins for one in each),
        waits=_spread(one.wait_bins for one in each),
        tasks=schema.TaskSpread(**msgspec.structs.asdict(tasks), slow_samples=inside["slow"]),
        by_epoch=by_epoch,
        epoch_s=epoch_times(by_epoch),
        device=_device(m, each),
        faults=_faults([one.faults for one in each if one.faults]),
        where=[
            schema.CodeLine(kind, name, line, ran / samplings, waited / samplings)
            for kind, name, line, ran, waited in inside["stacks"][:LINES]
        ],
        looks=samplings,
        kernel=schema.Kernel(**inside["kernel"], seconds=inside["seconds"]),
    )


def _spread(bins: Iterable[Mapping[int, int]]) -> schema.Spread:
    durations = Histogram()
    for each in bins:
        durations.merge(each)
    slow = durations.slow()
    return schema.Spread(durations.count, durations.median(), durations.quantile(0.95), slow.share, slow.number)


def _device(m: LoaderMetrics, each: Sequence[LoaderMetrics]) -> schema.Device:
    calls: dict[str, list[float]] = {}
    for one in each:
        for line, numbers in one.crossings.items():
            calls[line] = [a + b for a, b in zip(calls.get(line, [0, 0.0, 0]), numbers, strict=True)]
    crossings = []
    for key, (count, seconds, size) in sorted(calls.items(), key=lambda item: -item[1][1]):
        kind, _, line = key.partition(" ")
        crossings.append(schema.Crossing(kind, line, int(count), seconds, int(size)))
    starved = m.gap_s / m.gap_wait_s if m.gap_wait_s else 0.0
    return schema.Device(m.gaps, starved, m.crossing_steps, m.crossing_s, crossings, m.pinned_bytes)


def _faults(each: Sequence[JsonObject]) -> schema.Faults:
    """Merges what failed in all processes: adds numbers, concatenates lists."""
    out: JsonObject = {}
    for one in each:
        for key, value in one.items():
            out[key] = out[key] + value if key in out and isinstance(value, (int, list)) else value
    return msgspec.convert(out, schema.Faults)


def epoch_times(rows: Sequence[schema.EpochRow]) -> schema.EpochTimes:
    """Returns the wall-clock times of whole epochs, from the call of ``iter()`` to the end."""
    known = [row for row in rows if row.batches and row.loop_s > 0]
    most = max((row.batches for row in known), default=0)
    whole = [row for row in known if row.batches >= WHOLE * most]
    if not whole:
        return schema.EpochTimes()
    first, *later = whole
    return schema.EpochTimes(
        count=len(whole),
        first=first.loop_s,
        later=statistics.median(row.loop_s for row in later) if later else None,
        each=[round(row.loop_s, 4) for row in whole],
    )
