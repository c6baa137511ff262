"""What a loader did, in numbers. Nothing here costs a microsecond.

``diagnosis/report/merge.py`` makes a report of these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .types import Attributes, JsonObject

EPOCHS = 64  # of which numbers are kept one by one


@dataclass
class LoaderMetrics:
    """Sums over all epochs of one loader. Times are seconds of the consumer's clock unless stated otherwise.

    Attributes:
        name: the line that created the loader, as ``file:line``.
        batches: batches delivered.
        samples: samples in them.
        epochs: epochs begun.
        ended: epochs that were iterated to their end.
        made: loaders that the line created and that were iterated. ``at_once``: the most that existed at a time.
        wait_s: time that the consumer was blocked in ``next()``.
        first_wait_s: the part of ``wait_s`` before the first batch of each epoch, including the start of the workers.
        step_s: time of the consumer's own work between two batches.
        step_cpu_s: CPU seconds of all threads of the process meanwhile.
        between_s: after an epoch that was left with its first batch, until the next one was begun: a step, though no
            batch was asked for after it. ``left_at``: when that began; 0.0 where it did not.
        settings: the loader's settings, by torch's names.
        tasks: tasks that workers finished.
        fetch_ns, collate_ns, transport_ns: wall time in workers, summed over workers.
        cpu_ns: CPU time of those tasks.
        batch_bytes: the largest batch, as it crossed.
        worker_pss: memory of each worker, bytes, as it was measured last (its proportional set size).
        decisions: what ``num_workers="auto"`` changed while running, and why.
        inside: what the fetching processes say of their tasks, as ``worker_record.merge`` has it.
        step_bins, wait_bins: histograms of single steps and waits, the first wait of an epoch left out; by
            ``core.histogram.bin_of``.
        filled_epochs: epochs in which ``--apply`` filled a cache. Tasks, what is inside them, and the histograms are
            those of the epochs after them.
        loop_s: from each epoch's begin to its last batch or its end, all that stoker did in it included.
        by_epoch: ``[batches, wait_s, step_s, first_wait_s, loop_s, samples]`` of each epoch; the first ``EPOCHS`` of
            them.
        over_time: ``[s, share of it that was waiting, samples/s]`` about once a second, since the watch began.
        gaps: waits of which both ends were seen on the device; ``gap_wait_s`` of waiting, ``gap_s`` of which the device
            had nothing to do.
        crossings: calls that copy between host and device or wait for it, in ``crossing_steps`` steps of ``crossing_s``
            seconds together: by kind and line, ``[calls, seconds, bytes]`` (``watch.device.Crossings``).
        pinned_bytes: the most page-locked memory that torch held.
        faults: what failed, as docs/report.md has it; empty where nothing did.
    """

    name: str = ""
    batches: int = 0
    samples: int = 0
    epochs: int = 0
    ended: int = 0
    made: int = 0
    at_once: int = 0
    wait_s: float = 0.0
    first_wait_s: float = 0.0
    step_s: float = 0.0
    step_cpu_s: float = 0.0
    loop_s: float = 0.0
    filled_epochs: int = 0
    between_s: float = 0.0
    left_at: float = 0.0
    settings: Attributes = field(default_factory=dict)
    tasks: int = 0
    fetch_ns: int = 0
    collate_ns: int = 0
    transport_ns: int = 0
    cpu_ns: int = 0
    batch_bytes: int = 0
    worker_pss: dict[int, int] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)
    inside: JsonObject = field(default_factory=dict)
    step_bins: dict[int, int] = field(default_factory=dict)
    wait_bins: dict[int, int] = field(default_factory=dict)
    by_epoch: list[list[float]] = field(default_factory=list)
    over_time: list[list[float]] = field(default_factory=list)
    gaps: int = 0
    gap_s: float = 0.0
    gap_wait_s: float = 0.0
    crossings: dict[str, list[float]] = field(default_factory=dict)
    crossing_steps: int = 0
    crossing_s: float = 0.0
    pinned_bytes: int = 0
    faults: JsonObject = field(default_factory=dict)

    def task(self, times: tuple[int, int, int, int]) -> None:
        """Adds one task's nanoseconds: fetch, collate, transport, CPU."""
        fetch, collate, transport, cpu = times
        self.tasks += 1
        self.fetch_ns += fetch
        self.collate_ns += collate
        self.transport_ns += transport
        self.cpu_ns += cpu
