"""The result from what was measured: the curve, the limits, the lines to paste.

Also the knob that no window measures: page-locked memory.
"""

from __future__ import annotations

import time
from dataclasses import replace

from ..device.pin_policy import Pinning
from ..loader.auto.limits import Limit
from .measurements import KNEE
from .result import Point, Setting, TuneResult
from .search import Search

RANDOM_SAMPLERS = ("RandomSampler", "Feistel", "Chunk")


def summarize(search: Search, found: Setting) -> TuneResult:
    """The result, while workers are still there to be measured."""
    measured = search.measured
    best = found
    if "pin_memory" in search.knobs:
        best = replace(best, pin_memory=_pins(search, found))
    rates = measured.rates[found]
    return TuneResult(
        name=search.name,
        best=best,
        rate=measured.rate(found),
        low=min(rates),
        high=max(rates),
        curve=_curve(search, found),
        limits=tuple(search.limits),
        bound=_bound(search, found),
        reasons=search.reasons,
        lines=_lines(search, best),
        notes=tuple(search.notes),
        tried=tuple(measured.tried),
        seconds=time.monotonic() - measured.began,
    )


def _pins(search: Search, s: Setting) -> bool:
    batches = max(1, s.num_workers) * s.prefetch_factor + 1
    choice = Pinning().decide(search.measured.windows[s].nbytes, batches)
    search.reasons["pin_memory"] = f"{choice.on}: {choice.why}"
    return choice.on


def _curve(search: Search, found: Setting) -> tuple[Point, ...]:
    """Samples per second by number of workers."""
    measured = search.measured
    best: dict[int, Setting] = {}
    for s in measured.rates:
        other = best.get(s.num_workers)
        if other is None or s == found or (other != found and measured.rate(s) > measured.rate(other)):
            best[s.num_workers] = s
    rates = {n: measured.rates[s] for n, s in sorted(best.items())}
    return tuple(Point(n, measured.rate(best[n]), min(each), max(each), len(each)) for n, each in rates.items())


def _bound(search: Search, s: Setting) -> Limit | None:
    """The limit that kept the setting small: it is at its bound, and the curve still rises there."""
    if s.num_workers != search.limits[0].most or s.num_workers < 2:
        return None
    fewer = replace(s, num_workers=search.counts()[-2])
    rates = search.measured.rates
    rises = fewer not in rates or search.measured.rate(s) * KNEE > search.measured.rate(fewer)
    return search.limits[0] if rises else None


def _lines(search: Search, best: Setting) -> dict[str, str]:
    shuffle = any(name in type(search.loader.sampler).__name__ for name in RANDOM_SAMPLERS)
    arguments = _arguments(best, shuffle)
    return {"torch": f"DataLoader({arguments})", "stoker": f"stoker.DataLoader({arguments})"}


def _arguments(s: Setting, shuffle: bool) -> str:
    out = ["dataset"]
    if s.batch_size is not None:
        out.append(f"batch_size={s.batch_size}")
    if shuffle:
        out.append("shuffle=True")
    out.append(f"num_workers={s.num_workers}")
    if s.num_workers and s.prefetch_factor != 2:
        out.append(f"prefetch_factor={s.prefetch_factor}")
    if s.pin_memory:
        out.append("pin_memory=True")
    return ", ".join(out)
