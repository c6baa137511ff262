"""What a loader did, in numbers. Each update takes less than a microsecond.

``diagnosis/report/merge.py`` turns them into a report.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .types import Attributes, JsonObject

EPOCHS = 64  # number of epochs that are recorded one by one


@dataclass
class LoaderMetrics:
    """Totals over all epochs of one loader. Times are seconds of the consumer's clock unless stated otherwise."""

    name: str = ""  # line that created the loader, as ``file:line``
    batches: int = 0  # batches delivered
    samples: int = 0  # samples delivered
    epochs: int = 0  # epochs begun
    ended: int = 0  # epochs iterated to their end
    made: int = 0  # iterated loaders that this line created. ``at_once``: the most that existed at a time
    at_once: int = 0
    wait_s: float = 0.0  # time that the consumer was blocked in ``next()``
    # the part of ``wait_s`` before the first batch of each epoch, including the start of the workers
    first_wait_s: float = 0.0
    step_s: float = 0.0  # time of the consumer's own work between two batches
    step_cpu_s: float = 0.0  # CPU seconds of all threads of the process during ``step_s``
    loop_s: float = 0.0  # from the start of each epoch to its last batch or its end, including stoker's own work
    # epochs in which ``--apply`` filled a cache. Tasks, ``inside`` and the histograms cover only the epochs after them
    filled_epochs: int = 0
    # time from an epoch that was left after its first batch to the start of the next one: a step, although no batch was
    # requested after it. ``left_at``: when that began; 0.0 if it did not
    between_s: float = 0.0
    left_at: float = 0.0
    settings: Attributes = field(default_factory=dict)  # the loader's settings, under torch's names
    tasks: int = 0  # tasks that workers finished
    # fetch_ns, collate_ns, transport_ns: wall time in workers, summed over workers
    fetch_ns: int = 0
    collate_ns: int = 0
    transport_ns: int = 0
    cpu_ns: int = 0  # CPU time of these tasks
    batch_bytes: int = 0  # largest batch, as transported
    # last measured memory of each worker, bytes (proportional set size)
    worker_pss: dict[int, int] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)  # what ``num_workers="auto"`` changed during the run, and why
    # what the fetching processes report about their tasks, in the format of ``worker_record.merge``
    inside: JsonObject = field(default_factory=dict)
    # step_bins, wait_bins: histograms of single steps and waits, without the first wait of an epoch; by
    # ``core.histogram.bin_of``
    step_bins: dict[int, int] = field(default_factory=dict)
    wait_bins: dict[int, int] = field(default_factory=dict)
    # ``[batches, wait_s, step_s, first_wait_s, loop_s, samples, first_step_s]`` of each of the first ``EPOCHS`` epochs
    by_epoch: list[list[float]] = field(default_factory=list)
    # ``[s, share of it spent waiting, samples/s]`` about once a second, since the watch began
    over_time: list[list[float]] = field(default_factory=list)
    # waits with both ends observed on the device: ``gap_wait_s`` of waiting, for ``gap_s`` of which the device was idle
    gaps: int = 0
    gap_s: float = 0.0
    gap_wait_s: float = 0.0
    # calls that copy between host and device or wait for the device, in ``crossing_steps`` steps of ``crossing_s``
    # seconds in total: by kind and line, ``[calls, seconds, bytes]`` (``watch.device.Crossings``)
    crossings: dict[str, list[float]] = field(default_factory=dict)
    crossing_steps: int = 0
    crossing_s: float = 0.0
    pinned_bytes: int = 0  # peak of page-locked memory that torch held
    faults: JsonObject = field(default_factory=dict)  # what failed, as in docs/report.md; empty if nothing did

    def task(self, times: tuple[int, int, int, int]) -> None:
        """Adds one task's nanoseconds: fetch, collate, transport, CPU."""
        fetch, collate, transport, cpu = times
        self.tasks += 1
        self.fetch_ns += fetch
        self.collate_ns += collate
        self.transport_ns += transport
        self.cpu_ns += cpu
