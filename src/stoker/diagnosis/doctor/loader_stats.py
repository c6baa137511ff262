"""What the rules look at: one loader of a run, and the finding that a rule makes of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

STARVED = 0.10  # of the loop's time; worth fixing
BUSY = 0.5  # of the loop's time; workers that do less do not hold it up
RARE = 1 / 9  # of the steps; if more of them are long, the loop is uneven
GAPS = 10  # waits whose ends were seen on the device; fewer decide nothing
CROSSED = 4  # steps in which its calls were timed
LOOKS = 30  # at a stack; fewer say nothing of a tenth


@dataclass(frozen=True)
class LoaderStats:
    """What the rules look at: one loader of a run, as the report shows it.

    Attributes:
        loader: an entry of the report's ``loaders``.
        cores: cores granted.
        cuda: whether the script used CUDA.
        around: what the machine did meanwhile, as ``ambient`` has it.
        weight: the loader's part of the time of all loaders.
        gpus: accelerators that are there.
        memory: bytes that are granted; 0 where that is not known.
    """

    loader: dict[str, Any]
    cores: int
    cuda: bool = False
    around: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    gpus: int = 0
    memory: int = 0

    @property
    def batches(self) -> int:
        return max(1, int(self.loader["batches"]))

    @property
    def wait(self) -> float:
        """Seconds of waiting per batch, without what each epoch waits for its workers to start."""
        startup = float(self.loader["stages"].get("startup", {}).get("wait_s", 0.0))
        return max(0.0, float(self.loader["wait_s"]) - startup) / self.batches

    @property
    def step(self) -> float:
        """Seconds of the consumer's own work per batch."""
        return float(self.loader["step_s"]) / self.batches

    @property
    def share(self) -> float:
        """Part of the loop spent waiting; where the device's own time was seen, that in which it was starved."""
        total = self.wait + self.step
        seen = self.loader.get("device") or {}
        starved = seen["starved_share_of_wait"] if seen.get("gaps", 0) >= GAPS else 1.0
        return self.wait * starved / total if total else 0.0

    @property
    def idle(self) -> float | None:
        """Part of the loop in which the device is idle though its data is there; None where nobody knows."""
        used = [float(busy) for busy in self.around.get("gpu_busy", []) if busy]
        if not used or not self.cuda:
            return None
        return max(0.0, 1 - sum(used) / len(used) - self.share)

    def crossings(self, kind: str) -> tuple[dict[str, Any] | None, float]:
        """Of the calls of one kind (``watch_device.Crossings``): the costliest line, and the part of the loop that all
        of them take."""
        seen = self.loader.get("device") or {}
        found = [c for c in seen.get("crossings", []) if c["kind"] == kind]
        if not found or seen["steps"] < CROSSED or seen["seconds"] <= 0 or not self.step:
            return None, 0.0
        part = sum(c["seconds"] for c in found) / seen["seconds"] * self.step / (self.wait + self.step)
        return found[0], part

    @property
    def service(self) -> float | None:
        """Seconds of a worker's time per batch; None where the workers could not be seen."""
        stages = self.loader["stages"]
        tasks = int(stages.get("worker", {}).get("tasks", 0))
        if not tasks:
            return None
        return sum(float(s.get("self_s", 0.0)) for s in stages.values()) / tasks

    @property
    def cpu(self) -> float:
        """Seconds of CPU per batch that the workers used."""
        worker = self.loader["stages"].get("worker", {})
        return float(worker.get("cpu_s", 0.0)) / max(1, int(worker.get("tasks", 0)))

    @property
    def workers(self) -> int:
        return int(self.loader["settings"]["num_workers"])

    @property
    def startup(self) -> float:
        """Seconds, all epochs together, before each epoch's first batch."""
        return float(self.loader["stages"].get("startup", {}).get("wait_s", 0.0))

    @property
    def total(self) -> float:
        """Seconds of the loop, all of it."""
        return float(self.loader["wait_s"]) + float(self.loader["step_s"])

    @property
    def busy(self) -> float | None:
        """Part of the loop's time, without a few long steps, that a worker works; None where that was not seen."""
        if self.service is None:
            return None
        return self.service / max(1, self.workers) / max(1e-9, self.wait + self.step * self.even)

    @property
    def even(self) -> float:
        """The part of the steps' time that is not a few long ones (a checkpoint), in which workers idle with all they
        may have made."""
        steps = self.loader.get("steps", {})
        rare = steps.get("slow_count", 0) <= RARE * steps.get("count", 0)
        return 1 - float(steps.get("slow_share", 0.0)) if rare else 1.0

    @property
    def starved(self) -> bool:
        """Whether the loop waits so much that somebody's evening is worth it."""
        return self.share * self.weight >= STARVED

    @property
    def bottleneck(self) -> bool:
        """Whether it is the making of batches that the loop waits for: workers idle little, or there are none."""
        return self.starved and (not self.workers or (self.busy is not None and self.busy >= BUSY))

    @property
    def clear(self) -> float:
        """The part of a worker's time that says something about its code: not that of the few tasks that take many
        times the others', and not that in which it had no core."""
        slow = float(self.loader.get("tasks", {}).get("slow_share", 0.0))
        return (1 - slow) * (1 - min(1.0, self.delayed))

    def part(self, stage: str) -> float:
        """The part of the workers' time that one of ``stages`` takes."""
        stages = self.loader["stages"]
        own = float(stages.get(stage, {}).get("self_s", 0.0))
        made = sum(float(stages.get(s, {}).get("self_s", 0.0)) for s in ("fetch", "collate", "transport"))
        return own / made if made else 0.0

    def looks(self, kind: str, ran: bool = True, waited: bool = True) -> dict[str, float]:
        """By name and line, the part of a task's time (fetch and collate) spent in one kind of code; empty after few
        looks."""
        if int(self.loader.get("looks", 0)) < LOOKS:
            return {}
        out: dict[str, float] = {}
        for w in self.loader["where"]:
            if w["kind"] == kind:
                name = w["name"] if kind == "transform" else f"{w['name']} ({w['line']})"
                out[name] = out.get(name, 0.0) + ran * float(w["ran"]) + waited * float(w["waited"])
        return out

    @property
    def pooled(self) -> bool:
        """Whether threads of the dataset's own do most of the work."""
        seen, looks = self.loader.get("helpers") or {}, int(self.loader.get("looks", 0))
        return bool(seen.get("looks", 0) >= max(LOOKS, 0.5 * looks))

    @property
    def used(self) -> float:
        """Cores that the process of a busy worker uses, all its threads together."""
        spent = float((self.loader.get("kernel") or {}).get("cpu_ns", 0)) / 1e9
        own = 0.0 if self.workers else self.step_cpu * self.batches
        tasks = int(self.loader["stages"].get("worker", {}).get("tasks", 0))
        return (spent - own) / max(1e-9, (self.service or 0.0) * tasks)

    @property
    def waits(self) -> float:
        """The part of a task's time in which its worker waits for something that is not a core."""
        where = self.loader.get("where", [])
        if int(self.loader.get("looks", 0)) < LOOKS:
            return 0.0
        return sum(float(w["waited"]) for w in where)

    @property
    def delayed(self) -> float:
        """The part of the workers' time in which they could have run, and others did."""
        kernel = self.loader.get("kernel") or {}
        return float(kernel.get("delay_ns", 0)) / 1e9 / kernel["seconds"] if kernel.get("seconds") else 0.0

    @property
    def coreless(self) -> float:
        """The part of its tasks' time in which a worker could have run, and others did."""
        worked = (self.service or 0.0) * int(self.loader["stages"].get("worker", {}).get("tasks", 0))
        delay = float((self.loader.get("kernel") or {}).get("delay_ns", 0)) / 1e9
        return min(1.0, delay / worked) if worked else 0.0

    @property
    def step_cpu(self) -> float:
        """Seconds of CPU per batch that the consumer's own work takes, all threads together."""
        return float(self.loader["stages"].get("consumer", {}).get("cpu_s", 0.0)) / self.batches


@dataclass(frozen=True)
class Finding:
    """A cause with its evidence.

    Attributes:
        cause: the rule's id.
        share: part of the loop's time that it costs, 0 to 1.
        evidence: the numbers it rests on.
        fix: what to do, in one line.
        predicted_speedup: of the loop, by the model in the rule; None where it cannot say.
        change: the loader's settings, by torch's names, with which the fix is made; empty where it is another one.
        loader: the loader's name; ``diagnose`` fills it in.
        applied: ``stoker run --apply`` did it in this very run; ``measured_speedup`` is what that brought, where it is
            known: of later epochs for what is kept, of the whole loop otherwise.
    """

    cause: str
    share: float
    evidence: dict[str, Any] = field(default_factory=dict)
    fix: str = ""
    predicted_speedup: float | None = None
    change: dict[str, Any] = field(default_factory=dict)
    loader: str = ""
    applied: bool = False
    measured_speedup: float | None = None

    @property
    def brings(self) -> float:
        """The part of the loop's time that mending it saves: as predicted, or else all that it costs."""
        return 1 - 1 / self.predicted_speedup if self.predicted_speedup else self.share

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
