"""The result of ``stoker bench``: numbers, JSON and a table."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from ..core.terminal import counted, human_seconds, rate, table
from ..core.types import JsonObject

SCHEMA = 1


@dataclass(frozen=True)
class Rates:
    """Numbers of one loop over a loader. All of them but ``first_batch_s`` leave out the first batch.

    Attributes:
        first_batch_s: seconds from ``iter()`` to the first batch: start of the workers, a first reading.
        batches, samples, nbytes: delivered; bytes of all tensors in them.
        seconds: of the loop.
        epochs: how many had a batch, the first batch's included.
        wait_s: blocked in ``next()``, and in ``iter()`` if another epoch begins.
        step_s: the simulated step.
        p50_s, p95_s, p99_s: percentiles of the wait for one batch; None if none was measured.
        ended: why there are fewer batches than requested; "" if there are not.
    """

    first_batch_s: float
    batches: int
    samples: int
    nbytes: int
    seconds: float
    epochs: int
    wait_s: float
    step_s: float
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    ended: str = ""

    @property
    def samples_per_s(self) -> float | None:
        return self._per_s(self.samples)

    @property
    def batches_per_s(self) -> float | None:
        return self._per_s(self.batches)

    @property
    def mb_per_s(self) -> float | None:
        """Megabytes (1e6 bytes) of tensors per second."""
        return self._per_s(self.nbytes / 1e6)

    @property
    def wait_share(self) -> float | None:
        """Part of the loop spent waiting, 0 to 1."""
        return self._per_s(self.wait_s)

    def _per_s(self, amount: float) -> float | None:
        return amount / self.seconds if self.batches else None

    def as_dict(self) -> JsonObject:
        """For JSON."""
        derived = ("samples_per_s", "batches_per_s", "mb_per_s", "wait_share")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True)
class Bench:
    """What ``measure`` found.

    Attributes:
        name: what was measured.
        settings: of the loader, by torch's names, and ``engine``.
        step_s: seconds of the simulated step after each batch.
        loader: the empty loop.
        with_copy: the same with each batch copied to the device; None where there is no accelerator.
        device: the accelerator, or None.
        notes: what a reader should know about the numbers.
        machine: what the machine grants, as in ``stoker check --json``.
    """

    name: str
    settings: JsonObject
    step_s: float
    loader: Rates
    with_copy: Rates | None
    device: str | None
    notes: tuple[str, ...]
    machine: JsonObject

    def as_dict(self) -> JsonObject:
        """For JSON; ``docs/bench.md`` has the keys."""
        out = {"schema": SCHEMA, "kind": "bench", **dataclasses.asdict(self), "loader": self.loader.as_dict()}
        out["with_copy"] = self.with_copy and self.with_copy.as_dict()
        return out

    def __str__(self) -> str:
        s = self.settings
        workers = counted(s["num_workers"], "worker") + (" (auto)" if s["auto"] else "")
        size = f", batches of {s['batch_size']:,}" if s["batch_size"] else ""
        step = f", a step of {human_seconds(self.step_s)}" if self.step_s else ""
        runs = [self.loader] if self.with_copy is None else [self.loader, self.with_copy]
        headers = ["", "loader", f"with the copy to {self.device}"][: 1 + len(runs)]
        rows = [[name, *(figure(r) for r in runs)] for name, figure in _FIGURES]
        head = textwrap.wrap(f"{self.name}: {s['engine']}'s engine, {workers}{size}{step}", 80, break_long_words=False)
        lines = [*head, "", table(headers, rows, 80), ""]
        if self.device is None:
            lines.append("no accelerator found: copying to one was not measured")
        lines.append("rates and waits leave out the first batch")
        return "\n".join([*lines, *(textwrap.fill(f"note: {note}", 80) for note in self.notes)])


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else human_seconds(seconds)


_FIGURES: tuple[tuple[str, Callable[[Rates], str]], ...] = (
    ("first batch", lambda r: _time(r.first_batch_s)),
    ("samples/s", lambda r: rate(r.samples_per_s)),
    ("batches/s", lambda r: rate(r.batches_per_s)),
    ("MB/s", lambda r: rate(r.mb_per_s)),
    ("wait p50", lambda r: _time(r.p50_s)),
    ("wait p95", lambda r: _time(r.p95_s)),
    ("wait p99", lambda r: _time(r.p99_s)),
    ("part spent waiting", lambda r: "-" if r.wait_share is None else f"{r.wait_share:.0%}"),
    ("batches", lambda r: f"{r.batches:,}"),
    ("samples", lambda r: f"{r.samples:,}"),
    ("epochs begun", lambda r: f"{r.epochs:,}"),
    ("time", lambda r: _time(r.seconds)),
)
