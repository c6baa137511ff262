"""Chooses the settings that ``stoker tune`` measures, and the one it recommends.

::

    1 worker: its times give the limits
    -> workers: doubled while that pays, then the counts on both sides of the best
    -> more batches in flight; another batch size, if the user lets that move
    -> the same again from the best setting so far, until no knob moves
    -> no workers: one window
    -> the fastest few in turns, three windows each and more while there is time
    -> the knee: the smallest setting within 3 % of the fastest, by the medians
    -> page-locked memory, which no window measures
    -> what rules of thumb give: one window each that was not measured, while there is time
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..core import resources, terminal
from ..core.division import divides
from ..core.errors import UsageError
from ..device.accelerator import accelerator
from ..device.pin_policy import decide
from ..loader.auto.bench import BadSample, BenchWindow, TooSlow
from ..loader.auto.limits import Limit, limits
from ..loader.auto.tasks import keys_of
from .curve import Point
from .guesses import Guess, GuessInputs, guesses
from .measurements import KNEE, Measurements
from .result import Setting, TuneResult

FEW, MANY = 3, 8  # windows per finalist: minimum if there is time, and maximum
FINALISTS = 4
NEAR = 0.6  # share of the fastest single window, which may have been lucky, above which a setting is measured again
GAIN = 1 / KNEE  # a larger setting must be faster by this factor
PREFETCH = (2, 4, 8)  # 1 leaves no slack for a late consumer, which an empty loop cannot show
DEPTH = 4  # batches in flight per worker if they take next to no memory
CHEAP = 64  # at most this fraction of the budget for batches in flight
SHARE_OF_MEMORY = 0.8  # a dataset that reads more than this is as cold in the second epoch as in the first
READS = 1 << 14  # bytes a batch; below it, what was read are messages
FOR_BATCHES = ("budget", "shm", "pinned")  # limits that come from the size of a batch
WORKER_BYTES = 64 << 20  # of a worker whose memory is not known yet
RANDOM_SAMPLERS = ("RandomSampler", "Feistel")
NOT_DIVIDED = (
    "no other number of workers is tried: the iterable dataset does not appear to call get_worker_info(), so each "
    "worker would yield all of its samples"
)
NOT_COUNTED = "no other batch size is tried: it is unknown how many samples the iterable dataset has"
TRAINING = (
    "a different batch size changes the training: an epoch has more or fewer steps, and the best learning rate may "
    "change"
)


class TunerSearch:
    """One run of the tuner."""

    limits: list[Limit]  # of the number of workers, the tightest first, for batches of the loader's own size

    def __init__(self, measurements: Measurements, name: str, knobs: Sequence[str]) -> None:
        self.measured, self.name, self.knobs = measurements, name, knobs
        self.loader = measurements.loader
        self.reasons: dict[str, str] = {}  # why a knob has its value
        self.notes: list[str] = [measurements.tasks.note] if measurements.tasks.note else []

    def run(self) -> Setting:
        """Returns the setting to recommend. Raises UsageError if a sample cannot be loaded or is too slow."""
        s = Setting(1, batch_size=self.loader.batch_size)
        if "num_workers" in self.knobs and self.measured.is_stream and not divides(self.loader.dataset):
            self._hold("num_workers", NOT_DIVIDED)
        if "batch_size" in self.knobs and self.measured.is_stream:
            self._hold("batch_size", NOT_COUNTED)
        elif "batch_size" in self.knobs:
            self.notes.append(TRAINING)
        try:
            self._first(s)
            self._climb(s, self._fixed(s))
        except BadSample as e:
            raise UsageError(f"{self.name}: {self._why(e)}") from e
        best = self.measured.knee(self.measured.rates)
        self._explain(best)
        return best

    def _hold(self, knob: str, why: str) -> None:
        """A knob that may not move after all."""
        self.knobs = [other for other in self.knobs if other != knob]
        self.notes.append(why)

    def _climb(self, first: Setting, s: Setting) -> None:
        """Measures settings from ``s`` on until the time is over. Any measured setting may win, except ``first`` if one
        of its knobs has a value that is not allowed."""
        try:
            self.measured.rate(s)
            if s != first:
                self.measured.forget(first)
            s = self._rounds(s)
            if "num_workers" in self.knobs and not self.measured.is_stream and not self.measured.is_over():
                self.measured.measure(Setting(0, batch_size=s.batch_size))
            self._finalists(s)
        except TooSlow as e:
            self.notes.append(f"the time limit was reached during a measurement: {e}")

    def _rounds(self, s: Setting) -> Setting:
        """Coordinate search: one knob after the other, from the best setting so far, until none moves."""
        knobs = (self._num_workers, self._prefetch_factor, self._batch_size)
        settled = 0  # so many knobs have their best value beside the values that the others have now
        for knob in itertools.cycle(knobs):
            before, s = s, knob(s)
            settled = settled + 1 if s == before else 1
            if settled == len(knobs):
                break
        return s

    def counts(self, batch_size: int | None) -> list[int]:
        """Numbers of workers that may be tried."""
        most = self.limits_for(batch_size)[0].most
        return [n for n in range(1, most + 1) if n <= 4 or n in (6, 8, 12) or n % 16 == 0 or n == most]

    def _first(self, s: Setting) -> None:
        """Measures one worker, to learn the limits and whether files are read."""
        try:
            self.measured.measure(s)
        except TooSlow:
            raise UsageError(
                f"{self.name}: one batch takes longer than the {self.measured.budget_s:g} s allowed for tuning. Raise "
                "--time-limit or reduce the batch size"
            ) from None
        window = self.measured.windows[s]
        if self._reuse_tasks(window) and window.read > READS * window.batches and not self.measured.is_over():
            self.measured.forget(s)  # the measurement was of the disk
            self.measured.measure(s)
            window = self.measured.windows[s]
        self.limits = limits(
            waits=max(0.0, 1 - window.cpu_s / window.work_s) if window.work_s else 0.0,
            each=max(self.measured.bench.pss(), WORKER_BYTES),
            nbytes=window.nbytes,
            prefetch=s.prefetch_factor,
            budget=self.measured.transport,
            shm=type(self.loader).__module__.startswith("torch."),
            pinned=accelerator() is not None,
        )

    def _reuse_tasks(self, window: BenchWindow) -> bool:
        """Lets later windows repeat earlier samples if memory holds what an epoch reads. Returns whether it does."""
        tasks, dataset = self.measured.tasks, self.loader.dataset
        if self.measured.is_stream or not tasks.has_enough or not hasattr(dataset, "__len__"):
            return False
        epoch = window.read / max(1, window.batches) / max(1.0, tasks.samples) * len(dataset)
        if epoch > SHARE_OF_MEMORY * resources.memory_available():
            self.notes.append(
                f"an epoch reads about {epoch / 1e9:.3g} GB, more than fits in memory, so it was measured without a "
                "warm page cache"
            )
            return False
        tasks.fresh = False
        return True

    def _fixed(self, s: Setting) -> Setting:
        """Where the search begins: fixed knobs have the loader's own values."""
        if "num_workers" not in self.knobs:
            s = replace(s, num_workers=max(1, int(self.loader.num_workers)))
        if "prefetch_factor" not in self.knobs:
            s = replace(s, prefetch_factor=self.loader.prefetch_factor or PREFETCH[0])
        elif self._is_cheap():
            s = replace(s, prefetch_factor=DEPTH)
        self._base = s
        return s

    def _why(self, e: BadSample) -> str:
        last = str(e).strip().splitlines()[-1]
        where = f" ({e.where})" if e.where else ""
        needs_gpu = ("CUDA" in last or "NVIDIA" in last) and accelerator() is None
        gpu = " (it needs a GPU, but there is none here)" if needs_gpu else ""
        return f"a sample cannot be loaded: {last}{where}{gpu}"

    def _num_workers(self, s: Setting) -> Setting:
        if "num_workers" not in self.knobs:
            return s
        counts, measured = self.counts(s.batch_size), self.measured
        best, flat, n = s, 0, min(2 * s.num_workers, counts[-1])
        # Two steps without a gain end it: one may be too small for its noise.
        while s.num_workers < n <= counts[-1] and flat < 2 and not measured.is_over():
            more = replace(s, num_workers=n)
            faster = measured.rate(more) > GAIN * measured.rate(best)
            best, flat = (more, 0) if faster else (best, flat + 1)
            n = counts[-1] if n < counts[-1] < 2 * n else 2 * n
        for n in counts:
            if best.num_workers / 2 < n < 2 * best.num_workers and not measured.is_over():
                measured.rate(replace(s, num_workers=n))
        return measured.knee(k for k in measured.rates if replace(k, num_workers=1) == replace(s, num_workers=1))

    def _prefetch_factor(self, s: Setting) -> Setting:
        if "prefetch_factor" in self.knobs:
            for value in PREFETCH:
                deeper = replace(s, prefetch_factor=value)
                if value > s.prefetch_factor and self._fits(deeper) and not self.measured.is_over():
                    if self.measured.rate(deeper) <= GAIN * self.measured.rate(s):
                        break
                    s = deeper
        return s

    def _batch_size(self, s: Setting) -> Setting:
        """Twice the batch size while that pays and fits, or else half of it."""
        start, measured = s, self.measured
        for larger in (True, False):
            while "batch_size" in self.knobs and s.batch_size and not measured.is_over():
                other = replace(s, batch_size=2 * s.batch_size if larger else s.batch_size // 2)
                if not self._may_have(other) or measured.rate(other) <= GAIN * measured.rate(s):
                    break
                s = other
            if s != start:
                break  # what pays in one direction does not pay in the other
        return s

    def _may_have(self, s: Setting) -> bool:
        """Whether a dataset has as many samples as a batch of another size, and memory fits such batches in flight."""
        if not s.batch_size or s.batch_size > len(keys_of(self.loader)):
            return False
        bounds = (b.most for b in self.limits_for(s.batch_size) if b.name in FOR_BATCHES)
        return self._fits(s) and all(s.num_workers <= most for most in bounds)

    def limits_for(self, batch_size: int | None) -> list[Limit]:
        """The limits for batches of a size, the tightest first: fewer large batches fit than small ones."""
        times = (batch_size or 1) / (self.loader.batch_size or 1)
        found = [b._replace(most=int(b.most / times)) if b.name in FOR_BATCHES else b for b in self.limits]
        return sorted(found, key=lambda b: b.most)

    def _is_cheap(self) -> bool:
        """Whether ``DEPTH`` batches in flight for each of as many workers as there may be take next to no memory."""
        in_flight = self.measured.nbytes(self.loader.batch_size) * DEPTH * self.limits[0].most
        return in_flight <= self.measured.transport.flight_bytes // CHEAP

    def _fits(self, s: Setting) -> bool:
        nbytes = self.measured.nbytes(s.batch_size)
        device = accelerator()
        if device is not None and device.type == "cuda" and 2 * nbytes > torch.cuda.mem_get_info()[0]:
            return False  # there must be room for the batch in use and the next one
        return nbytes * s.prefetch_factor * s.num_workers <= self.measured.transport.flight_bytes

    def _finalists(self, s: Setting) -> None:
        """Measures the fastest settings alternately, because the best of many single windows is biased upwards."""
        alike = sorted(self.measured.rates, key=lambda k: -self.measured.rate(k))
        fastest = self.measured.rate(alike[0])
        finalists = [k for k in alike if self.measured.rate(k) >= NEAR * fastest][:FINALISTS]
        own = [k for k in alike if k.batch_size == self.loader.batch_size]  # it stays unless another one is faster
        finalists += [k for k in dict.fromkeys((s, *own[:1])) if k not in finalists]
        self.measured.alternate(finalists, MANY if len(finalists) > 1 else FEW - 1)

    def _explain(self, best: Setting) -> None:
        if "batch_size" in self.knobs:
            self.reasons["batch_size"] = self._why_batch_size(best)
        rates, rate = self.measured.rates, self.measured.rate
        if "num_workers" in self.knobs and not best.num_workers:
            other = max((k for k in rates if k.num_workers and k.batch_size == best.batch_size), key=rate)
            alone, with_workers = terminal.rate(rate(best)), terminal.rate(rate(other))
            self.reasons["num_workers"] = f"0: one process alone makes {alone} samples/s, {other.words} {with_workers}"
            return
        if "num_workers" in self.knobs:
            self.reasons["num_workers"] = f"{best.num_workers} is the smallest within 3 % of the best"
            if len(rates[best]) < FEW and self.measured.is_over():
                self.reasons["num_workers"] += ", of those that could be measured in time"
        if "prefetch_factor" in self.knobs:
            self.reasons["prefetch_factor"] = self._why_prefetch(best)

    def _why_batch_size(self, best: Setting) -> str:
        rates, rate, own = self.measured.rates, self.measured.rate, self.loader.batch_size
        fastest: dict[int | None, float] = {}  # by batch size
        for s in rates:
            fastest[s.batch_size] = max(rate(s), fastest.get(s.batch_size, 0.0))
        others = [n for n in sorted(fastest, key=lambda n: n or 0) if n != best.batch_size]
        if best.batch_size != own:
            return f"{best.batch_size} makes {rate(best) / fastest[own]:.2f}x the samples/s of the loader's own {own}"
        words = ", ".join(f"{n} brings {fastest[n] / rate(best) - 1:+.0%}" for n in others)
        return f"{own}, the loader's own: {words or 'no other size was tried'}"

    def _why_prefetch(self, best: Setting) -> str:
        value = best.prefetch_factor
        deeper = [k for p in PREFETCH if p > value and (k := replace(best, prefetch_factor=p)) in self.measured.rates]
        if deeper:
            gain = self.measured.rate(deeper[0]) / self.measured.rate(best) - 1
            words = f"{value}: {deeper[0].prefetch_factor} brings {gain:+.0%}"
        else:
            words = f"{value}: the largest value that was tried"
        if value == DEPTH == self._base.prefetch_factor:
            nbytes = self.measured.nbytes(best.batch_size) * DEPTH * best.num_workers
            words += f"; it costs {nbytes / 1e6:.3g} MB and absorbs jitter that short windows do not show"
        return words

    def result(self, found: Setting) -> TuneResult:
        """Builds the result, while workers still exist to be measured."""
        measured = self.measured
        best = replace(found, pin_memory=self._pins()) if "pin_memory" in self.knobs else found
        rates, bound = measured.rates[found], self._bound(found)
        guessed = self._guesses(found) if "num_workers" in self.knobs else ()
        return TuneResult(
            name=self.name,
            best=best,
            rate=measured.rate(found),
            low=min(rates),
            high=max(rates),
            curve=self._curve(found),
            limits=tuple(self.limits_for(found.batch_size)),
            bound=bound,
            reasons=self.reasons,
            lines=self._lines(best),
            guesses=guessed,
            notes=tuple(self.notes),
            tried=tuple(measured.tried),
            seconds=time.monotonic() - measured.began,
        )

    def _guesses(self, found: Setting) -> tuple[Guess, ...]:
        """What rules of thumb give here, beside the setting that was found."""
        batch = float(found.batch_size or self.measured.tasks.samples)
        gpus, rate = max(1, torch.cuda.device_count()), self.measured.rate(found)
        inputs = GuessInputs(gpus, resources.cores_granted(), batch, found.prefetch_factor, rate)
        return tuple(self._measured_guess(g, found) for g in guesses(inputs))

    def _measured_guess(self, g: Guess, found: Setting) -> Guess:
        """A guess with its samples/s: of the curve, else of a window of its own, if limits and time allow one."""
        known = {p.workers: p.rate for p in self._curve(found)}
        if g.workers in known:
            return g._replace(rate=known[g.workers])
        tightest = self.limits_for(found.batch_size)[0]
        if g.workers > tightest.most:
            return g._replace(why=f"more than the limit of {tightest.most:,} ({tightest.name})")
        why = "no time was left"
        try:
            if self.measured.has_time_for_one():
                return g._replace(rate=self.measured.measure(replace(found, num_workers=g.workers)))
        except TooSlow:
            pass
        except BadSample:
            why = "a sample could not be loaded"
        return g._replace(why=why)

    def _pins(self) -> bool:
        choice = decide()
        self.reasons["pin_memory"] = f"{choice.on}: {choice.why}"
        return choice.on

    def _curve(self, found: Setting) -> tuple[Point, ...]:
        """Samples per second by number of workers: of ``found``, and of the fastest setting of each other number."""
        measured = self.measured
        best: dict[int, Setting] = {}
        for s in sorted(measured.rates, key=measured.rate):
            if s.batch_size == found.batch_size:
                best[s.num_workers] = s
        best[found.num_workers] = found
        rates = {n: measured.rates[s] for n, s in sorted(best.items())}
        return tuple(Point(n, measured.rate(best[n]), min(each), max(each), len(each)) for n, each in rates.items())

    def _bound(self, s: Setting) -> Limit | None:
        """The limit that kept the setting small: it is at its bound, and the curve still rises there."""
        tightest = self.limits_for(s.batch_size)[0]
        if s.num_workers != tightest.most or s.num_workers < 2:
            return None
        fewer = replace(s, num_workers=self.counts(s.batch_size)[-2])
        rates, rate = self.measured.rates, self.measured.rate
        return tightest if fewer not in rates or rate(s) * KNEE > rate(fewer) else None

    def _lines(self, best: Setting) -> dict[str, str]:
        out = ["dataset"] + [f"batch_size={best.batch_size}"] * (best.batch_size is not None)
        if any(name in type(self.loader.sampler).__name__ for name in RANDOM_SAMPLERS):
            out.append("shuffle=True")
        out.append(f"num_workers={best.num_workers}")
        if best.num_workers and best.prefetch_factor != 2:
            out.append(f"prefetch_factor={best.prefetch_factor}")
        if best.pin_memory:
            out.append("pin_memory=True")
        arguments = ", ".join(out)
        return {"torch": f"DataLoader({arguments})", "stoker": f"stoker.DataLoader({arguments})"}
