"""What the curve of workers should look like, from one worker's times: a straight line into a ceiling.

Little's law (J. D. C. Little, "A Proof for the Queuing Formula L = lambda W", Operations Research 9, 1961) gives the
line: n workers that take ``work_s`` each make n / work_s batches a second. The ceiling is the cores' (all the CPU time
of a batch, the consumer's included) or the consumer's own.
"""

from __future__ import annotations

from dataclasses import dataclass

KNEE = 0.97  # the smallest setting within 3 % of the best


@dataclass(frozen=True)
class Model:
    """One worker's times and the machine.

    Attributes:
        work_s: wall seconds of a worker for a batch, alone.
        cpu_s: CPU seconds of that.
        own_s: CPU seconds of the consumer for a batch.
        cores: granted.

    Example:
        >>> m = Model(work_s=0.1, cpu_s=0.02, own_s=0.001, cores=2)
        >>> round(m.rate(4)), m.knee(16)
        (40, 10)
    """

    work_s: float
    cpu_s: float
    own_s: float
    cores: int

    def rate(self, n: int) -> float:
        """Batches per second of ``n`` workers."""
        line = n / max(self.work_s, 1e-9)
        return min(line, self.cores / max(self.cpu_s + self.own_s, 1e-9), 1 / max(self.own_s, 1e-9))

    def knee(self, most: int) -> int:
        """The smallest count within 3 % of the best of up to ``most``."""
        best = self.rate(most)
        return next(n for n in range(1, most + 1) if self.rate(n) >= KNEE * best)

    @property
    def waits(self) -> float:
        """Share of a worker's time in which it waits for something that is not the CPU."""
        return max(0.0, 1 - self.cpu_s / self.work_s) if self.work_s else 0.0
