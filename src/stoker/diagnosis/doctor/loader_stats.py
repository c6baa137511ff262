"""What the rules look at: one loader of a run, and the shares of its loop's time that they compare with thresholds."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from ...core.types import JsonObject
from ..report.schema import Around, Crossing, LoaderReport

STARVED = 0.10  # of the loop's time; a loop that waits less is not worth fixing
BUSY = 0.5  # of the loop's time; workers that do less do not hold it up
RARE = 1 / 9  # of the steps; if more of them are long, the loop is uneven
MIN_GAPS = 10  # waits whose ends were seen on the device; fewer decide nothing
MIN_TIMED_STEPS = 4  # steps in which its calls were timed; fewer decide nothing
MIN_STACKS = 30  # stack samples; fewer say nothing of a tenth
MIN_BATCHES = 5  # of an epoch that counts


class RuleFinding(Struct, frozen=True):
    """What a rule found; ``schema.Finding`` has the same fields, and the rule's name."""

    share: float
    evidence: JsonObject
    fix: str
    predicted_speedup: float | None = None
    change: JsonObject = {}


@dataclass(frozen=True)
class LoaderStats:
    """What the rules look at: one loader of a run. "Loop" is waiting and stepping together; "wait" is without what each
    epoch waits for its workers to start."""

    loader: LoaderReport
    cores: int = 1  # granted
    cuda: bool = False  # the script used it
    around: Around = field(default_factory=Around)
    weight: float = 1.0  # the loader's part of the time of all loaders
    gpus: int = 0  # of the machine
    memory: int = 0  # bytes that are granted; 0 where that is not known

    # Seconds of one batch.

    @property
    def batches(self) -> int:
        return max(1, self.loader.batches)

    @property
    def wait(self) -> float:
        return max(0.0, self.loader.wait_s - self.startup) / self.batches

    @property
    def step(self) -> float:
        """The consumer's own work."""
        return self.loader.step_s / self.batches

    @property
    def loop(self) -> float:
        return self.wait + self.step

    @property
    def step_cpu(self) -> float:
        """CPU seconds of the consumer's own work, all threads together."""
        return self.loader.stages.consumer.cpu_s / self.batches

    @property
    def service(self) -> float | None:
        """A worker's time; None where the workers could not be seen."""
        stages = self.loader.stages
        return stages.made_s / stages.worker.tasks if stages.worker.tasks else None

    @property
    def cpu(self) -> float:
        """CPU seconds that the workers' own threads used."""
        worker = self.loader.stages.worker
        return worker.cpu_s / max(1, worker.tasks)

    # Seconds of the whole run.

    @property
    def startup(self) -> float:
        """Before each epoch's first batch, all epochs together."""
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
        """Spent waiting; where the device's own time was seen, only the wait in which it was starved."""
        device = self.loader.device
        starved = device.starved_share_of_wait if device.gaps >= MIN_GAPS else 1.0
        return self.wait * starved / self.loop if self.loop else 0.0

    @property
    def idle(self) -> float | None:
        """In which the device is idle though its data is there; None where that is not known."""
        used = [busy for busy in self.around.gpu_busy if busy]
        if not used or not self.cuda or self.loader.filled_epochs:  # a device waits while a cache is filled
            return None
        return max(0.0, 1 - sum(used) / len(used) - self.share)

    @property
    def busy(self) -> float | None:
        """In which a worker works, a few long steps left out; None where that was not seen."""
        if self.service is None:
            return None
        return self.service / max(1, self.workers) / max(1e-9, self.wait + self.step * self._even)

    @property
    def _even(self) -> float:
        """The part of the steps' time that is not a few long ones (a checkpoint). During a long one workers idle: all
        batches that they may prefetch are made."""
        steps = self.loader.steps
        return 1 - steps.slow_share if steps.slow_count <= RARE * steps.count else 1.0

    def crossings(self, kind: str) -> tuple[Crossing | None, float]:
        """Of the calls of one kind: the costliest line, and the part of the loop that all of them take."""
        device = self.loader.device
        found = [c for c in device.crossings if c.kind == kind]
        if not found or device.steps < MIN_TIMED_STEPS or device.seconds <= 0 or not self.step:
            return None, 0.0
        return found[0], sum(c.seconds for c in found) / device.seconds * self.step / self.loop

    # Parts of the workers' time.

    def stage_share(self, seconds: float) -> float:
        """The part that these seconds of one stage are of the workers' time."""
        made = self.loader.stages.made_s
        return seconds / made if made else 0.0

    def code_shares(self, kind: str, ran: bool = True, waited: bool = True) -> dict[str, float]:
        """By name and line, the part of a task's time in one kind of code; empty where few stacks were sampled."""
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
        """In which the fetching thread waits for something that is not a core."""
        return sum(code.waited for code in self.loader.where) if self._sampled else 0.0

    @property
    def helper_cores(self) -> float:
        """Cores that other threads of a busy worker's process use together: a pool of the dataset's own."""
        loader = self.loader
        own = loader.stages.worker.cpu_s + (0.0 if self.workers else loader.stages.consumer.cpu_s)
        return max(0.0, loader.kernel.cpu_ns / 1e9 - own) / max(1e-9, self.worked)

    @property
    def delayed(self) -> float:
        """Of the workers' lives: they could have run, and had no core."""
        kernel = self.loader.kernel
        return kernel.delay_ns / 1e9 / kernel.seconds if kernel.seconds else 0.0

    @property
    def coreless(self) -> float:
        """Of the tasks' time: their worker could have run, and had no core."""
        return min(1.0, self.loader.kernel.delay_ns / 1e9 / self.worked) if self.worked else 0.0

    @property
    def stalled(self) -> float:
        """Of the worst ten seconds: a task waited for memory, pages that it reads again included."""
        return min(1.0, self.around.memory_stalled_max)

    @property
    def explained_by_code(self) -> float:
        """The part that says something about the code of a usual sample: not the time of the few slow tasks, not the
        time without a core, and not that of pages that are read again: a line of code seems to take it."""
        return (1 - self.loader.tasks.slow_share) * (1 - min(1.0, self.delayed)) * (1 - self.stalled)

    @property
    def kernel_share(self) -> float:
        """Of the workers' CPU time: in the kernel."""
        kernel = self.loader.kernel
        return kernel.system_ns / max(1, kernel.cpu_ns)

    # Questions that several rules ask.

    @property
    def repeats(self) -> bool:
        """Whether another number of workers would repeat samples, or leave some out: of an iterable dataset that was
        not seen to divide them among workers."""
        return self.loader.settings.iterable and not self.loader.settings.divides

    @property
    def draws(self) -> bool:
        """Whether making batches in the script's process was seen to draw random numbers there."""
        return self.loader.settings.draws

    @property
    def workers(self) -> int:
        return self.loader.settings.num_workers

    @property
    def starved(self) -> bool:
        """Whether the loop waits so much that it is worth fixing."""
        return self.share * self.weight >= STARVED

    @property
    def bottleneck(self) -> bool:
        """Whether the loop waits for batches being made: workers idle little, or there are none."""
        return self.starved and (not self.workers or (self.busy is not None and self.busy >= BUSY))


# A loader as it is in its later epochs: without what happens once, such as a cold cache or a cache being filled.


def filling_epochs(loader: LoaderReport) -> int:
    """The first epochs, in which stoker filled a cache; 0 where it did not, or where no epoch followed them."""
    if not loader.cache.filled:
        return 0
    first = max(1, loader.filled_epochs)
    return first if any(e.batches >= MIN_BATCHES for e in loader.by_epoch[first:]) else 0


def later_epochs(loader: LoaderReport) -> LoaderReport:
    """The loader with waits and steps such as those of its later epochs, for as many batches."""
    first = filling_epochs(loader)
    epochs = loader.by_epoch[first:] if first else [e for e in loader.by_epoch if e.batches >= MIN_BATCHES][1:]
    scale = loader.batches / sum(e.batches for e in epochs)
    wait_s = sum(e.later_wait_s for e in epochs) * scale
    step_s = sum(e.step_s for e in epochs) * scale
    startup, stages = loader.stages.startup, loader.stages
    if first:  # the first wait of all is for the trial, and for a first batch that is not cached
        startup = msgspec.structs.replace(startup, wait_s=sum(e.first_wait_s for e in epochs) * scale)
        stages = msgspec.structs.replace(stages, startup=startup)
    return msgspec.structs.replace(loader, wait_s=startup.wait_s + wait_s, step_s=step_s, stages=stages)
