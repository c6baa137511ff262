"""What a loader did, in numbers. Nothing here costs a microsecond.

``diagnosis/report/merge.py`` makes a report of these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .types import Attributes, JsonObject

EPOCHS = 64  # of which numbers are kept one by one


@dataclass
class LoaderMetrics:
    """Sums over all epochs of one loader. Times are seconds of the consumer's clock unless stated otherwise."""

    name: str = ""  # the line that created the loader, as ``file:line``
    batches: int = 0  # batches delivered
    samples: int = 0  # samples in them
    epochs: int = 0  # epochs begun
    ended: int = 0  # epochs that were iterated to their end
    made: int = 0  # loaders that the line created and that were iterated. ``at_once``: the most that existed at a time
    at_once: int = 0
    wait_s: float = 0.0  # time that the consumer was blocked in ``next()``
    # the part of ``wait_s`` before the first batch of each epoch, including the start of the workers
    first_wait_s: float = 0.0
    step_s: float = 0.0  # time of the consumer's own work between two batches
    step_cpu_s: float = 0.0  # CPU seconds of all threads of the process meanwhile
    loop_s: float = 0.0  # from each epoch's begin to its last batch or its end, all that stoker did in it included
    # epochs in which ``--apply`` filled a cache. Tasks, what is inside them, and the histograms are those of the epochs
    # after them
    filled_epochs: int = 0
    # after an epoch that was left with its first batch, until the next one was begun: a step, though no batch was asked
    # for after it. ``left_at``: when that began; 0.0 where it did not
    between_s: float = 0.0
    left_at: float = 0.0
    settings: Attributes = field(default_factory=dict)  # the loader's settings, by torch's names
    tasks: int = 0  # tasks that workers finished
    # fetch_ns, collate_ns, transport_ns: wall time in workers, summed over workers
    fetch_ns: int = 0
    collate_ns: int = 0
    transport_ns: int = 0
    cpu_ns: int = 0  # CPU time of those tasks
    batch_bytes: int = 0  # the largest batch, as it crossed
    # memory of each worker, bytes, as it was measured last (its proportional set size)
    worker_pss: dict[int, int] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)  # what ``num_workers="auto"`` changed while running, and why
    # what the fetching processes say of their tasks, as ``worker_record.merge`` has it
    inside: JsonObject = field(default_factory=dict)
    # step_bins, wait_bins: histograms of single steps and waits, the first wait of an epoch left out; by
    # ``core.histogram.bin_of``
    step_bins: dict[int, int] = field(default_factory=dict)
    wait_bins: dict[int, int] = field(default_factory=dict)
    # ``[batches, wait_s, step_s, first_wait_s, loop_s, samples, first_step_s]`` of each epoch; the first ``EPOCHS``
    by_epoch: list[list[float]] = field(default_factory=list)
    # ``[s, share of it that was waiting, samples/s]`` about once a second, since the watch began
    over_time: list[list[float]] = field(default_factory=list)
    # waits of which both ends were seen on the device; ``gap_wait_s`` of waiting, ``gap_s`` of which the device had
    # nothing to do
    gaps: int = 0
    gap_s: float = 0.0
    gap_wait_s: float = 0.0
    # calls that copy between host and device or wait for it, in ``crossing_steps`` steps of ``crossing_s`` seconds
    # together: by kind and line, ``[calls, seconds, bytes]`` (``watch.device.Crossings``)
    crossings: dict[str, list[float]] = field(default_factory=dict)
    crossing_steps: int = 0
    crossing_s: float = 0.0
    pinned_bytes: int = 0  # the most page-locked memory that torch held
    faults: JsonObject = field(default_factory=dict)  # what failed, as docs/report.md has it; empty where nothing did

    def task(self, times: tuple[int, int, int, int]) -> None:
        """Adds one task's nanoseconds: fetch, collate, transport, CPU."""
        fetch, collate, transport, cpu = times
        self.tasks += 1
        self.fetch_ns += fetch
        self.collate_ns += collate
        self.transport_ns += transport
        self.cpu_ns += cpu
