"""The rules' input: one loader of a run, and the shares of its loop's time that rules compare with thresholds."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from ...core.types import JsonObject
from ..report.schema import Around, Crossing, LoaderReport

STARVED = 0.10  # of the loop's time; a loop that waits less is not worth fixing
BUSY = 0.5  # of the loop's time; workers that are busy for less do not hold up the loop
RARE = 1 / 9  # of the steps; if more of them are long, the loop is uneven
MIN_GAPS = 10  # waits timed on the device from begin to end; fewer are inconclusive
MIN_TIMED_STEPS = 4  # steps in which device calls were timed; fewer are inconclusive
MIN_STACKS = 30  # stack samples; with fewer, a share of a tenth is noise
MIN_BATCHES = 5  # shorter epochs do not count
# What the first workers add to a loop without any: torch's, measured on two cores (python -m benchmarks run).
HANDOVER_S = 0.4e-3  # CPU seconds per batch: 0.58 ms for 64 scalars, of which 0.18 ms is making them
START_S = 10e-3  # seconds per worker and epoch, with fork


class RuleFinding(Struct, frozen=True):
    """What a rule found: the fields of ``schema.Finding`` that a rule decides."""

    share: float
    evidence: JsonObject
    fix: str
    predicted_speedup: float | None = None
    change: JsonObject = {}


@dataclass(frozen=True)
class LoaderStats:
    """One loader of a run, as the rules see it. "Loop" means waits plus steps. "Wait" excludes each epoch's wait for
    its workers to start."""

    loader: LoaderReport
    cores: int = 1  # granted
    cuda: bool = False  # the script used CUDA
    around: Around = field(default_factory=Around)
    weight: float = 1.0  # this loader's share of the time of all loaders
    gpus: int = 0  # of the machine
    memory: int = 0  # bytes granted; 0 if unknown

    # Seconds per batch.

    @property
    def batches(self) -> int:
        return max(1, self.loader.batches)

    @property
    def wait(self) -> float:
        return max(0.0, self.loader.wait_s - self.startup) / self.batches

    @property
    def step(self) -> float:
        """Time of the consumer's own work."""
        return self.loader.step_s / self.batches

    @property
    def loop(self) -> float:
        return self.wait + self.step

    @property
    def step_cpu(self) -> float:
        """CPU time of the consumer's own work, summed over threads."""
        return self.loader.stages.consumer.cpu_s / self.batches

    @property
    def service(self) -> float | None:
        """A worker's time per task; None if no task was observed."""
        stages = self.loader.stages
        return stages.made_s / stages.worker.tasks if stages.worker.tasks else None

    @property
    def cpu(self) -> float:
        """CPU time of the worker thread that runs the task."""
        worker = self.loader.stages.worker
        return worker.cpu_s / max(1, worker.tasks)

    # Seconds of the whole run.

    @property
    def startup(self) -> float:
        """Wait before the first batch, summed over epochs."""
        return self.loader.stages.startup.wait_s

    @property
    def total(self) -> float:
        return self.loader.busy_s

    @property
    def worked(self) -> float:
        return (self.service or 0.0) * self.loader.stages.worker.tasks

    # Parts of the loop's time.

    @property
    def share(self) -> float:
        """Spent waiting. If enough waits were timed on the device, only the part in which the device starved."""
        device = self.loader.device
        starved = device.starved_share_of_wait if device.gaps >= MIN_GAPS else 1.0
        return self.wait * starved / self.loop if self.loop else 0.0

    @property
    def idle(self) -> float | None:
        """In which the device is idle although it has its data; None if unknown."""
        used = [busy for busy in self.around.gpu_busy if busy]
        if not used or not self.cuda or self.loader.filled_epochs:  # the device also waits while a cache fills
            return None
        return max(0.0, 1 - sum(used) / len(used) - self.share)

    @property
    def busy(self) -> float | None:
        """In which a worker is busy, ignoring a few long steps; None if no task was observed."""
        if self.service is None:
            return None
        # In a long step, such as a checkpoint, workers idle, because they have made every batch they may prefetch.
        steps = self.loader.steps
        even = 1 - steps.slow_share if steps.slow_count <= RARE * steps.count else 1.0
        return self.service / max(1, self.workers) / max(1e-9, self.wait + self.step * even)

    def crossings(self, kind: str) -> tuple[Crossing | None, float]:
        """Returns the costliest line with calls of this kind, and the share of the loop that all such calls take."""
        device = self.loader.device
        found = [c for c in device.crossings if c.kind == kind]
        if not found or device.steps < MIN_TIMED_STEPS or device.seconds <= 0 or not self.step:
            return None, 0.0
        return found[0], sum(c.seconds for c in found) / device.seconds * self.step / self.loop

    # Predictions, by the largest of three lower bounds of the time per batch: the consumer's own step, a task's time
    # divided by the number of workers, and all CPU time divided by the number of cores. These are the bottleneck bounds
    # of a closed queueing network (Denning and Buzen, "The operational analysis of queueing network models", ACM
    # Computing Surveys 10(3), 1978).

    def period(self, workers: int, left: float = 1.0) -> float | None:
        """Predicts seconds per batch with ``workers`` workers, if this part of a task's time were left. None if the
        workers' time is unknown."""
        service = self.service
        if service is None:
            return None
        if workers == 0:
            return self.step + service * left
        handover = start = 0.0
        if self.workers == 0:
            handover, start = HANDOVER_S, START_S * workers * self.loader.epochs / self.batches
        cpu = self.cpu * left + self.step_cpu + handover
        return start + max(self.step, service * left / workers, cpu / self.cores)

    def speedup(self, workers: int, left: float = 1.0) -> float | None:
        """Predicts the speed-up by the same changes: loop time now over loop time then, at least 1."""
        then = self.period(workers, left)
        return max(1.0, self.loop / then) if then else None

    def without(self, part: float) -> float | None:
        """Predicts the speed-up if ``part`` of a task's time were saved, with the same number of workers."""
        return self.speedup(self.workers, 1 - min(1.0, max(0.0, part)))

    # Parts of the workers' time.

    @property
    def collate(self) -> float:
        stages = self.loader.stages
        return stages.collate.self_s / stages.made_s if stages.made_s else 0.0

    def code_shares(self, kind: str, ran: bool = True, waited: bool = True) -> dict[str, float]:
        """Returns each code's share of a task's time, for one kind of code, by name and line. ``ran`` and ``waited``
        say which states count. Empty if too few stacks were sampled."""
        out: dict[str, float] = {}
        for code in self.loader.where if self._sampled else ():
            if code.kind == kind:
                name = code.name if kind == "transform" else f"{code.name} ({code.line})"
                out[name] = out.get(name, 0.0) + ran * code.ran + waited * code.waited
        return out

    @property
    def _sampled(self) -> bool:
        return self.loader.looks >= MIN_STACKS

    @property
    def waits(self) -> float:
        """In which the fetching thread waits for something other than a core."""
        return sum(code.waited for code in self.loader.where) if self._sampled else 0.0

    @property
    def helper_cores(self) -> float:
        """Cores that the other threads of a busy worker's process use together, such as a pool of the dataset's."""
        loader = self.loader
        own = loader.stages.worker.cpu_s + (0.0 if self.workers else loader.stages.consumer.cpu_s)
        return max(0.0, loader.kernel.cpu_ns / 1e9 - own) / max(1e-9, self.worked)

    @property
    def delayed(self) -> float:
        """Of the workers' lives: runnable, but without a core."""
        kernel = self.loader.kernel
        return kernel.delay_ns / 1e9 / kernel.seconds if kernel.seconds else 0.0

    @property
    def coreless(self) -> float:
        """Of the tasks' time: the worker was runnable, but had no core."""
        return min(1.0, self.loader.kernel.delay_ns / 1e9 / self.worked) if self.worked else 0.0

    @property
    def stalled(self) -> float:
        """Of the worst ten seconds: a task stalled on memory, which includes reading evicted pages again."""
        return min(1.0, self.around.memory_stalled_max)

    @property
    def explained_by_code(self) -> float:
        """The part that an ordinary sample's code accounts for. Excludes slow tasks, time without a core, and reading
        evicted pages again, which a stack sample blames on a line of code."""
        return (1 - self.loader.tasks.slow_share) * (1 - min(1.0, self.delayed)) * (1 - self.stalled)

    @property
    def kernel_share(self) -> float:
        """The part of the workers' CPU time spent in the kernel."""
        return self.loader.kernel.system_ns / max(1, self.loader.kernel.cpu_ns)

    # Questions that several rules ask.

    @property
    def repeats(self) -> bool:
        """Whether changing the number of workers would repeat or drop samples: the dataset is iterable and was not
        seen to divide its samples among workers."""
        return self.loader.settings.iterable and not self.loader.settings.divides

    @property
    def workers(self) -> int:
        return self.loader.settings.num_workers

    @property
    def starved(self) -> bool:
        """Whether the loop waits long enough to be worth fixing."""
        return self.share * self.weight >= STARVED

    @property
    def bottleneck(self) -> bool:
        """Whether making batches is what the loop waits for: there are no workers, or they idle little."""
        return self.starved and (not self.workers or (self.busy is not None and self.busy >= BUSY))


# A loader in its later epochs: without one-time effects such as a cold page cache or filling stoker's cache.


def filling_epochs(loader: LoaderReport) -> int:
    """Returns how many epochs at the start filled stoker's cache; 0 if none did, or if no long one followed."""
    if not loader.cache.filled:
        return 0
    first = max(1, loader.filled_epochs)
    return first if any(e.batches >= MIN_BATCHES for e in loader.by_epoch[first:]) else 0


def later_epochs(loader: LoaderReport) -> LoaderReport:
    """Returns the loader as if all its batches had the waits and steps of its later epochs."""
    first = filling_epochs(loader)
    epochs = loader.by_epoch[first:] if first else [e for e in loader.by_epoch if e.batches >= MIN_BATCHES][1:]
    scale = loader.batches / sum(e.batches for e in epochs)
    wait_s = sum(e.later_wait_s for e in epochs) * scale
    step_s = sum(e.step_s for e in epochs) * scale
    startup, stages = loader.stages.startup, loader.stages
    if first:  # the run's first wait includes the trial and a first batch that is not cached
        startup = msgspec.structs.replace(startup, wait_s=sum(e.first_wait_s for e in epochs) * scale)
        stages = msgspec.structs.replace(stages, startup=startup)
    return msgspec.structs.replace(loader, wait_s=startup.wait_s + wait_s, step_s=step_s, stages=stages)
