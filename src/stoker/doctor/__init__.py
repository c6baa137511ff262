"""The doctor: rules over what was seen. One rule a file; each says nothing, or a finding with evidence and a fix."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """What the rules look at: one loader of a run, as the report shows it.

    Attributes:
        loader: an entry of the report's ``loaders``.
        cores: cores granted.
        cuda: whether the script used CUDA.
    """

    loader: dict[str, Any]
    cores: int
    cuda: bool = False

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
        """Part of the loop spent waiting."""
        total = self.wait + self.step
        return self.wait / total if total else 0.0

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
    """

    cause: str
    share: float
    evidence: dict[str, Any] = field(default_factory=dict)
    fix: str = ""
    predicted_speedup: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
