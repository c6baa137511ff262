"""The result from what was measured: the curve, what rules of thumb would have cost, the limits, the lines to paste.

Also the knobs that no window measures: page-locked memory, and workers that stay.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

from ..core import resources
from ..device.accelerator import accelerator, copy_rates
from ..loader.auto.bench import TooSlow
from ..loader.auto.limits import Limit
from ..loader.auto.model import KNEE
from .curve import Point
from .result import Setting, TuneResult
from .rules_of_thumb import Guess, guesses
from .search import Search

NOTES = 6  # at most
RESTART_SHARE = 0.01  # of an epoch's time, above which workers had better stay
PIN_GAIN = 1.05  # what page-locked memory has to bring
GPU_COPY = 64 << 20  # bytes, to measure a GPU's throughput with
GUESSES_RESERVE = 0.05  # of the budget, in which no more rules of thumb are measured
RANDOM_SAMPLERS = ("RandomSampler", "Feistel", "Chunk")


def summarize(search: Search, found: Setting) -> TuneResult:
    """The result, while workers are still there to be measured.

    Args:
        search: which has run.
        found: the setting that it recommends.
    """
    measured = search.measured
    best = found
    if "pin_memory" in search.knobs:
        best = replace(best, pin_memory=_pins(search, found))
    if "persistent_workers" in search.knobs and found.num_workers:
        best = replace(best, persistent_workers=_workers_stay(search, found))
    with_guesses = _guesses(search, found)
    curve = _curve(search, found)
    _note_disagreement(search, found, curve)
    rates = measured.rates[found]
    return TuneResult(
        name=search.name,
        best=best,
        rate=measured.rate(found),
        low=min(rates),
        high=max(rates),
        curve=curve,
        guesses=with_guesses,
        limits=tuple(search.limits),
        bound=_bound(search, found),
        reasons=search.reasons,
        lines=_lines(search, best),
        notes=tuple(search.notes),
        tried=tuple(measured.tried),
        seconds=time.monotonic() - measured.began,
    )


def _pins(search: Search, s: Setting) -> bool:
    device = accelerator()
    if device is None:
        search.reasons["pin_memory"] = "False: no accelerator"
        return False
    plain, locked = copy_rates(device, max(1 << 16, search.measured.windows[s].nbytes))
    pins = locked > PIN_GAIN * plain
    search.reasons["pin_memory"] = (
        f"{pins}: to the device {locked / 1e9:.3g} GB/s from page-locked memory, {plain / 1e9:.3g} from other"
    )
    return pins


def _workers_stay(search: Search, s: Setting) -> bool:
    """Whether starting workers anew takes a notable part of an epoch."""
    reason, stay = "False: there was no time to measure a restart", False
    samples = search.most_samples()
    if search.measured.is_stream:
        reason = "False: how long an epoch of a stream is, is not known"
    elif s.worker_method == "thread":
        reason = "False: threads start at once"
    elif not search.measured.is_over(reserve=0):
        with contextlib.suppress(TooSlow):
            restart = search.measured.restart_s(s)
            epoch = samples / search.measured.rate(s)
            share = restart / (restart + epoch)
            stay = share > RESTART_SHARE
            reason = f"{stay}: starting workers anew takes {restart:.2g} s, {share:.1%} of an epoch of {epoch:,.3g} s"
    search.reasons["persistent_workers"] = reason
    return stay


def _curve(search: Search, found: Setting) -> tuple[Point, ...]:
    """Samples per second by number of workers, with the method and batch size of ``found``."""
    measured = search.measured
    method = found.worker_method if found.num_workers else "process"
    best: dict[int, Setting] = {}
    for s in measured.rates:
        if s.batch_size == found.batch_size and (s.worker_method == method or not s.num_workers):
            other = best.get(s.num_workers)
            if other is None or s == found or (other != found and measured.rate(s) > measured.rate(other)):
                best[s.num_workers] = s
    points = []
    for n in sorted({*best, *(n for n in search.counts() if n <= 2 * max(best))}):
        rates = measured.rates[best[n]] if n in best else []
        predicted = search.model.rate(n) * measured.samples(found) if n and method == "process" else None
        if rates:
            points.append(Point(n, measured.rate(best[n]), min(rates), max(rates), predicted, len(rates)))
        elif predicted is not None:
            points.append(Point(n, None, None, None, predicted, 0))
    return tuple(points)


def _note_disagreement(search: Search, found: Setting, curve: tuple[Point, ...]) -> None:
    """Notes where measurement and model differ: at the recommended number of workers, and at the largest measured."""
    largest = max(p.workers for p in curve if p.rate is not None)
    for p in curve:
        if p.workers < 2 or p.workers not in (found.num_workers, largest) or p.predicted is None or p.rate is None:
            continue
        window = search.measured.windows.get(replace(found, num_workers=p.workers))
        if window is not None and len(search.notes) < NOTES:
            note = search.model.disagreement(p.workers, p.rate / search.measured.samples(found), window.work_s)
            search.notes += [note] if note else []


def _guesses(search: Search, found: Setting) -> tuple[Guess, ...]:
    """Rules of thumb, each with the rate that it would have had."""
    measured = search.measured
    samples, best = measured.samples(found), measured.rate(found)
    device = accelerator()
    throughput = copy_rates(device, GPU_COPY)[1] if device is not None else None
    sample_bytes = int(measured.nbytes(found.batch_size) / max(1.0, samples))
    batch_size = max(1, found.batch_size or round(samples))
    prefetch = found.prefetch_factor if found.num_workers else 2
    out = []
    for g in guesses(search.model.cores, len(resources.gpu_names()), batch_size, sample_bytes, throughput):
        rate, how = None, g.words
        if g.workers is not None:
            setting = Setting(g.workers, prefetch_factor=prefetch, batch_size=found.batch_size)
            rate, how = _guessed_rate(search, setting)
        out.append(replace(g, rate=rate, share=None if rate is None else rate / best, how=how))
    return tuple(out)


def _guessed_rate(search: Search, s: Setting) -> tuple[float | None, str]:
    measured = search.measured
    bound = next((b for b in search.limits if b.most < s.num_workers and b.name != "cores"), None)
    if bound is not None:
        return None, f"not tried: {bound.words}"
    if s not in measured.rates and s.num_workers <= 2 * search.limits[0].most and not measured.is_over(GUESSES_RESERVE):
        with contextlib.suppress(TooSlow):
            measured.measure(s)
    if s in measured.rates:
        return measured.rate(s), "measured"
    processes = [k for k in measured.rates if k.num_workers and k.worker_method == "process"]
    near = min(processes, key=lambda k: (k.batch_size != s.batch_size, abs(k.num_workers - s.num_workers)))
    # What the model says, corrected by what it was wrong by at the nearest number of workers that was measured.
    return measured.rate(near) * search.model.rate(s.num_workers) / search.model.rate(near.num_workers), "model"


def _bound(search: Search, s: Setting) -> Limit | None:
    """The limit that kept the setting small: it is at its bound, and the curve still rises there."""
    if s.num_workers != search.limits[0].most or s.num_workers < 2:
        return None
    fewer = replace(s, num_workers=search.counts()[-2])
    rates = search.measured.rates
    rises = fewer not in rates or search.measured.rate(s) * KNEE > search.measured.rate(fewer)
    return search.limits[0] if rises else None


def _lines(search: Search, best: Setting) -> dict[str, str]:
    theirs = best
    if best.worker_method == "thread":  # which torch's loader has not
        alike = [s for s in search.measured.rates if s.batch_size == best.batch_size and s.num_workers]
        knee = search.measured.knee([s for s in alike if s.worker_method == "process"])
        theirs = replace(best, **{name: getattr(knee, name) for name in ("num_workers", "prefetch_factor")})
    shuffle = any(name in type(search.loader.sampler).__name__ for name in RANDOM_SAMPLERS)
    return {
        "torch": f"DataLoader({_arguments(theirs, shuffle)})",
        "stoker": f"stoker.DataLoader({_arguments(best, shuffle, own=True)})",
    }


def _arguments(s: Setting, shuffle: bool, own: bool = False) -> str:
    out = ["dataset"]
    if s.batch_size is not None:
        out.append(f"batch_size={s.batch_size}")
    if shuffle:
        out.append("shuffle=True")
    out.append(f"num_workers={s.num_workers}")
    if s.num_workers:
        if own and s.worker_method != "process":
            out.append(f'worker_method="{s.worker_method}"')
        if s.prefetch_factor != 2:
            out.append(f"prefetch_factor={s.prefetch_factor}")
        if s.persistent_workers:
            out.append("persistent_workers=True")
    if s.pin_memory:
        out.append("pin_memory=True")
    return ", ".join(out)
