"""``stoker.tune``: coordinate descent over a loader's settings, one knob at a time, each decided by measuring.

Greedy hill-climbing, round and round until nothing moves: contenders alternate in short windows, and a contest is over
when the interval of their ratio says so. The first window gives a model of the whole curve, and so the place to begin.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core import resources
from ..core.errors import UsageError
from ..core.random_state import preserved
from ..device.accelerator import accelerator
from ..loader.auto.bench import BadSample, PoolBench, TooSlow, Window
from ..loader.auto.decide import unsafe
from ..loader.auto.limits import Limit, limits
from ..loader.auto.model import KNEE, Model
from .measurements import RESERVE, Measurements, words_of
from .result import Setting, TuneResult, figure

ROUNDS = 3  # through all knobs, at most
STRIDE = 4  # the next count to try is so many times this one, while the model proves right
TRUST = 0.85  # which it does while a measurement is not below this part of what it says
NEAR = 0.8  # of the best: who enters the last race
ENTRANTS = 5  # at most
RACE_S = 4.0  # seconds that it may take; longer where what led to it did
DEPTH = 4  # batches in flight for each worker where that costs next to nothing
NOTHING = 64  # which is this part of the budget
MORE = 1 / KNEE  # a larger setting has to be faster by this
METHOD_GAIN = 1.05  # threads by this: in processes more code is safe
PREFETCH = (2, 4, 8)  # 1 leaves no slack for a consumer that is late, which an empty loop cannot see
JITTER = "it costs {:.3g} MB, and takes up jitter that short windows do not show"
SHARE_OF_MEMORY = 0.8  # a dataset that reads more than this is as cold in the second epoch as in the first
READS = 1 << 14  # bytes a batch, below which it is the messages that were read
WORKER_BYTES = 64 << 20  # a worker that has not weighed itself yet


class Search(Measurements):
    """One run of the tuner.

    Args:
        loader: what to tune.
        name: what to call it.
        knobs: which settings may move.
        budget_s: seconds it may take.
        progress: called with a line for each measurement.

    Attributes:
        model: of the curve; made by the first window.
        limits: the tightest first.
        reasons: why a knob has its value.
        notes: what else there is to say.
    """

    model: Model

    def __init__(
        self, loader: Any, name: str, knobs: Sequence[str], budget_s: float, progress: Callable[[str], None]
    ) -> None:
        super().__init__(loader, budget_s, progress)
        self.name, self.knobs = name, knobs
        self.cores = resources.cores_granted()
        self.reasons: dict[str, str] = {}
        self.notes: list[str] = [self.tasks.note] if self.tasks.note else []
        self.limits: list[Limit] = []
        self.reads = False
        self._no_threads: str | None = None
        self._torchs = type(loader).__module__.startswith("torch.")

    def run(self, summarize: Callable[[Search, Setting], TuneResult]) -> TuneResult:
        """All of it; ``summarize`` makes the result while workers are still there to be measured.

        Raises:
            UsageError: a sample cannot be loaded, or not one batch comes within the budget.
        """
        s = Setting(1, batch_size=self.loader.batch_size)
        try:
            with preserved():
                return summarize(self, self._run())
        except BadSample as e:
            raise UsageError(f"{self.name}: {self._why(e, s)}") from e
        finally:
            self.close()

    def _run(self) -> Setting:
        s = Setting(1, batch_size=self.loader.batch_size)
        s = self._first(s)
        fixed = Setting(
            max(1, int(self.loader.num_workers)),
            prefetch_factor=self.loader.prefetch_factor or 2,
            batch_size=s.batch_size,
        )
        if "num_workers" not in self.knobs:
            s = replace(s, num_workers=fixed.num_workers)
        if "prefetch_factor" not in self.knobs:
            s = replace(s, prefetch_factor=fixed.prefetch_factor)
        elif self._cheap(s):
            s = replace(s, prefetch_factor=DEPTH)
        if s not in self.seen:
            self.measure(s)
        try:
            for _ in range(ROUNDS):
                before = s
                for knob in ("num_workers", "worker_method", "prefetch_factor", "batch_size"):
                    if knob in self.knobs and not self.over():
                        s = getattr(self, f"_{knob}")(s)
                if s == before or self.over():
                    break
            s = self._final(s) if "num_workers" in self.knobs else s
        except TooSlow as e:
            self.notes.append(f"the time was over in the middle of a measurement: {e}")
        return s

    def _first(self, s: Setting) -> Setting:
        try:
            w = self.measure(s).window
        except TooSlow:
            raise UsageError(
                f"{self.name}: one batch takes longer than the {self.budget_s:g} s there are for tuning: a larger "
                "--budget-s, or a smaller batch"
            ) from None
        assert w is not None
        self.reads = w.read > READS * w.batches
        bench = self.bench(s)
        self.model = Model(w.work_s, w.cpu_s, w.own_s, self.cores)
        self._warm(s, w)
        each = max(bench.pss(), WORKER_BYTES)
        self.limits = limits(
            waits=self.model.waits,
            each=each,
            nbytes=w.nbytes,
            prefetch=s.prefetch_factor,
            budget=self.budget,
            shm=self._torchs,
            pinned=accelerator() is not None,
        )
        return s

    def _warm(self, s: Setting, w: Window) -> None:
        """From now on what is read was read before, unless memory cannot hold all that an epoch reads."""
        if self.streams or not self.tasks.enough:
            return
        try:
            samples = len(self.loader.dataset)
        except TypeError:
            return
        each = w.read / max(1, w.batches) / max(1.0, self.tasks.samples)
        if each * samples > SHARE_OF_MEMORY * resources.memory_available():
            self.notes.append(
                f"an epoch reads about {each * samples / 1e9:.3g} GB, more than memory keeps: measured cold"
            )
            return
        self.tasks.fresh = False
        if w.stored > w.read // 4 and not self.over():
            self.seen.pop(s)  # the first reading was the disk's
            warm = self.measure(s).window
            assert warm is not None
            self.model = Model(warm.work_s, warm.cpu_s, warm.own_s, self.cores)

    def _why(self, e: BadSample, s: Setting) -> str:
        text = str(e).strip()
        last = text.splitlines()[-1]
        bench = self.bench(s)
        index = bench.culprit() if isinstance(bench, PoolBench) and not self.streams else None
        what = "a sample cannot be loaded" if index is None else f"sample {index!r} cannot be loaded"
        hint = ""
        if "CUDA" in last or "NVIDIA" in last:
            hint = " (it needs a GPU, and there is none here)" if accelerator() is None else ""
        return f"{what}: {last}{hint}"

    def counts(self) -> list[int]:
        most = self.limits[0].most
        return [n for n in range(1, most + 1) if n <= 4 or n in (6, 8, 12) or n % 16 == 0 or n == most]

    def _num_workers(self, s: Setting) -> Setting:
        counts = self.counts()

        def with_(i: int) -> Setting:
            return replace(s, num_workers=counts[i])

        known = s.num_workers in counts and len(self.seen) > 2
        at = counts.index(s.num_workers) if known else self._begin(with_, counts)
        while at + 1 < len(counts) and not self.over():
            if self.better(with_(at), with_(at + 1), MORE):
                at += 1
            elif at + 2 < len(counts) and self.better(with_(at), with_(at + 2), MORE):
                at += 2  # a step so small that noise hid it
            else:
                break
        while at > 0 and not self.over() and not self.better(with_(at - 1), with_(at), MORE):
            at -= 1
        self.reasons["num_workers"] = f"{counts[at]} is the smallest within 3 % of the best"
        if self.over():
            self.reasons["num_workers"] += ", as far as there was time to measure"
        return with_(at)

    def _begin(self, with_: Callable[[int], Setting], counts: list[int]) -> int:
        """Towards the model's knee, in strides, as long as the model proves right."""
        goal = self.model.knee(counts[-1])
        at, before, best = 0, 0, 0.0
        while True:
            seen = self.seen.get(with_(at)) or self.measure(with_(at))
            n = counts[at]
            if seen.rate < best:
                return before
            before, best = at, seen.rate
            right = seen.rate > TRUST * self.model.rate(n) * self.of(with_(at))[1].samples
            if n >= goal or not right or self.over():
                return at
            ahead = max(i for i, k in enumerate(counts) if k <= min(goal, STRIDE * n))
            if ahead == at:
                return at  # the goal lies between two counts
            at = ahead

    def _worker_method(self, s: Setting) -> Setting:
        other = replace(s, worker_method="thread" if s.worker_method == "process" else "process")
        if self._torchs:
            self.reasons["worker_method"] = "process: torch's loader has no other; stoker's line has what is best there"
        no = self._no_threads or unsafe(self.loader)
        if self.streams:
            no = "an iterable dataset: each thread would need a copy of it"
        if no:
            self.reasons["worker_method"] = f"process: {no}"
            return replace(s, worker_method="process")
        try:
            wins = self.better(*((s, other) if other.worker_method == "thread" else (other, s)), METHOD_GAIN)
        except (BadSample, TooSlow) as e:
            self._no_threads = f"a sample could not be loaded in a thread: {str(e).splitlines()[-1]}"
            return self._worker_method(replace(s, worker_method="process"))
        thread = other if other.worker_method == "thread" else s
        process = other if thread is s else s
        who = self.seen[thread].window
        if who is not None and who.who is not None:
            self._no_threads = f"{who.who} draws from the process-wide random generators, which threads cannot repeat"
            return self._worker_method(process)
        a, b = self.seen[process].rate, self.seen[thread].rate
        best = thread if wins else process
        if "num_workers" in self.knobs and not wins and b >= KNEE * a and s.num_workers <= self.cores:
            self._more_threads(thread)
        self.reasons["worker_method"] = (
            f"{best.worker_method}: {s.num_workers} threads make {figure(b)} samples/s, as many processes {figure(a)}"
        )
        return best

    def _more_threads(self, s: Setting) -> None:
        """Threads that wait for the interpreter lock want to be more than cores: measured for the last race."""
        more = [n for n in self.counts() if n >= 2 * s.num_workers]
        other = replace(s, num_workers=more[0]) if more else s
        if other not in self.seen and not self.over():
            with contextlib.suppress(BadSample, TooSlow):
                self.measure(other)

    def _prefetch_factor(self, s: Setting) -> Setting:
        least = DEPTH if self._cheap(s) else PREFETCH[0]
        choices = [p for p in PREFETCH if p >= least and (p == least or self._fits(s, p))]
        at = choices.index(s.prefetch_factor) if s.prefetch_factor in choices else 0

        def with_(i: int) -> Setting:
            return replace(s, prefetch_factor=choices[i])

        while at + 1 < len(choices) and not self.over() and self.better(with_(at), with_(at + 1), MORE):
            at += 1
        while at > 0 and not self.over() and not self.better(with_(at - 1), with_(at), MORE):
            at -= 1
        value = choices[at]
        more = [self.seen[with_(i)].rate for i in range(at + 1, len(choices)) if with_(i) in self.seen]
        if more and self.seen[with_(at)].rate:
            self.reasons["prefetch_factor"] = (
                f"{value}: {choices[at + 1]} brings {more[0] / self.seen[with_(at)].rate - 1:+.0%}"
            )
        else:
            self.reasons["prefetch_factor"] = f"{value}: the most that was tried"
        if value == least == DEPTH:
            mb = (self._nbytes(s) * DEPTH * s.num_workers) / 1e6
            self.reasons["prefetch_factor"] += "; " + JITTER.format(mb)
        return with_(at)

    def _cheap(self, s: Setting) -> bool:
        """Whether DEPTH batches in flight for each of as many workers as there may be are next to nothing."""
        return self._nbytes(s) * DEPTH * self.limits[0].most <= self.budget.flight_bytes // NOTHING

    def _nbytes(self, s: Setting) -> int:
        return max(
            (v.window.nbytes for k, v in self.seen.items() if v.window and k.batch_size == s.batch_size), default=0
        )

    def _final(self, s: Setting) -> Setting:
        """The best settings once more, in turns, because the best of many noisy figures is too good; and of those
        within 3 % of the best then, the smallest. It may take as long as all that led to it."""
        self.reserve = 2 * RESERVE  # what the answer says beside the setting is measured after the race
        none = self._inline(s)
        alike = [k for k in self.seen if k.batch_size == s.batch_size and k.num_workers]
        if self._no_threads:
            alike = [k for k in alike if k.worker_method == "process"]
        if "prefetch_factor" in self.knobs and self._cheap(s):
            alike = [k for k in alike if k.prefetch_factor >= DEPTH]
        alike += [none] if none is not None else []
        alike.sort(key=lambda k: -self.seen[k].rate)
        top = self.seen[alike[0]].rate
        entrants = [k for k in alike if self.seen[k].rate >= NEAR * top][:ENTRANTS]
        entrants += [] if s in entrants else [s]
        if len(entrants) == 1:
            return s
        now = time.monotonic()
        # No workers come last among equals: their work adds to the model's, and does not run beside it.
        best = self.race(
            entrants,
            now + max(now - self.began, RACE_S),
            lambda k: (k.num_workers or math.inf, k.worker_method, k.prefetch_factor),
        )
        best = best or s
        if not best.num_workers:
            self.reasons["num_workers"] = (
                f"0: one process alone makes {figure(self.seen[best].rate)} samples/s, "
                f"and {figure(self.seen[s].rate)} with {words_of(s)}"
            )
            self.reasons.pop("worker_method", None)
            return best
        if best.num_workers != s.num_workers:
            self.reasons["num_workers"] = f"{best.num_workers} is the smallest within 3 % of the best, measured again"
        if best.worker_method != s.worker_method:
            self.reasons["worker_method"] = (
                f"{best.worker_method}: {words_of(best)} make {figure(self.seen[best].rate)} samples/s, "
                f"{words_of(s)} {figure(self.seen[s].rate)}, measured again"
            )
        return best

    def _fits(self, s: Setting, prefetch: int) -> bool:
        nbytes = self._nbytes(s)
        device = accelerator()
        if device is not None and device.type == "cuda" and 2 * nbytes > torch.cuda.mem_get_info()[0]:
            return False  # the batch in use, and the next one
        return nbytes * prefetch * s.num_workers <= self.budget.flight_bytes

    def _batch_size(self, s: Setting) -> Setting:
        if s.batch_size is None:
            self.reasons["batch_size"] = "the loader makes its own batches"
            return s
        began = s.batch_size
        while not self.over():
            size = 2 * (s.batch_size or 1)
            larger = replace(s, batch_size=size)
            if (
                size > self.most_samples()
                or not self._fits(s, 2 * s.prefetch_factor)
                or not self.better(s, larger, METHOD_GAIN)
            ):
                break
            s = larger
        self.reasons["batch_size"] = (
            f"{s.batch_size}: the loader's rate only; training may want another (it had {began})"
        )
        return s

    def most_samples(self) -> int:
        try:
            return len(self.loader.dataset)
        except TypeError:
            return 1 << 30

    def _inline(self, s: Setting) -> Setting | None:
        """No workers at all, measured; None where that is no choice."""
        if self.streams or self.over():
            return None
        none = replace(s, num_workers=0, worker_method="process", prefetch_factor=2)
        try:
            if none not in self.seen:
                self.measure(none)
        except (BadSample, TooSlow) as e:
            self.notes.append(f"no workers at all could not be measured: {str(e).splitlines()[-1]}")
            return None
        return none
