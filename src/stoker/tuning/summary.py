"""The answer from what was measured: the curve, what folklore would have cost, the limits, the lines to paste."""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..core import resources
from ..core.errors import UsageError
from ..device.accelerator import accelerator, copy_rates
from ..loader import engine
from ..loader.auto.bench import TooSlow
from ..loader.auto.limits import Limit
from ..loader.auto.model import KNEE
from .curve import Guessed, Point
from .measurements import RESERVE, TASKS, Seen
from .result import Setting, TuneResult
from .rules_of_thumb import guesses
from .statistics import interval

if TYPE_CHECKING:
    from ..loader.auto.tasks import Tasks
    from .search import Search

NOTES = 6  # at most
RESTART_SHARE = 0.01  # of an epoch's time, above which workers had better stay
GAIN = 1.05  # what page-locked memory has to bring
CACHE_GAIN = 1.2  # and a cache, in a worker's time for a sample
CACHE_LEAST_S = 20e-6  # saved for each sample; of less, looking at single samples cannot tell
CACHE_EPOCHS = 10  # in so many epochs at most


def summarize(t: Search, s: Setting) -> TuneResult:
    t.reserve = RESERVE
    warm, cold = _cold(t, s)
    s = _cached(t, _persistent(t, _pinned(t, s)))
    seen = t.seen[_plain(s)]
    low, high = interval(seen.rates)
    guessed = _guessed(t, s)
    curve = _curve(t, s)
    bound = _bound(t, s)
    for p in [p for p in curve if p.workers in (s.num_workers, max(q.workers for q in curve if q.rate is not None))]:
        setting = replace(_plain(s), num_workers=p.workers) if p.workers else None
        if setting in t.seen and s.worker_method == "process" and len(t.notes) < NOTES:
            w = t.seen[setting].window
            rate = t.seen[setting].rate / t.of(s)[1].samples
            words = t.model.disagreement(p.workers, rate, w.work_s) if w is not None and p.workers > 1 else None
            if words:
                t.notes.append(words)
    lines, theirs = _lines(t, s)
    torch_rate = _torch(t, theirs)
    return TuneResult(
        name=t.name,
        best=s,
        rate=seen.rate,
        low=low,
        high=high,
        curve=curve,
        guesses=guessed,
        limits=tuple(t.limits),
        bound=bound,
        reasons=t.reasons,
        lines=lines,
        warm=warm,
        cold=cold,
        torch_rate=torch_rate,
        notes=tuple(t.notes),
        tried=tuple(t.tried),
        seconds=time.monotonic() - t.began,
    )


def _cold(t: Search, s: Setting) -> tuple[float | None, float | None]:
    """Samples per second warm and cold. Cold is measured on what was not read before."""
    if t.streams or not t.reads:
        return None, None
    if t.tasks.fresh:
        return None, t.seen[s].rate
    cold = None
    if not t.over() and s.worker_method == "process" and s.num_workers:
        t.tasks.fresh = True
        try:
            w = t.bench(s).window(s.num_workers, s.prefetch_factor, t.window_s(), TASKS)
        except TooSlow:
            t.notes.append("there was no time for a cold measurement")
        else:
            cold = w.rate * t.tasks.samples
            if w.stored < w.read // 20:
                t.notes.append("all that was read for the first time was in the page cache already: cold is not cold")
        finally:
            t.tasks.fresh = False
    return t.seen[s].rate, cold


def _pinned(t: Search, s: Setting) -> Setting:
    if "pin_memory" not in t.knobs:
        return s
    device = accelerator()
    if device is None:
        t.reasons["pin_memory"] = "False: no accelerator"
        return s
    speeds = copy_rates(device, max(1 << 16, t.seen[s].window.nbytes if t.seen[s].window else 1 << 20))  # type: ignore[union-attr]
    pins = speeds[1] > GAIN * speeds[0]
    t.reasons["pin_memory"] = (
        f"{pins}: to the device {speeds[1] / 1e9:.3g} GB/s from page-locked memory, {speeds[0] / 1e9:.3g} from other"
    )
    return replace(s, pin_memory=pins)


def _cached(t: Search, s: Setting) -> Setting:
    """Whether the deterministic part of the dataset is to be kept. Measured on single samples, in this process: to
    measure later epochs a cache would have to be filled first."""
    if "cache" not in t.knobs:
        return s
    if t.streams:
        t.reasons["cache"] = "None: the samples of a stream have no index to be kept under"
        return s
    from ..staging.estimate import worth  # only for who asks

    try:
        found = worth(t.loader.dataset)
    except UsageError as e:
        t.reasons["cache"] = f"None: {str(e).splitlines()[0]}"
        return s
    now = found.prepare_s + found.augment_s
    later = (1 - found.share) * found.prepare_s + found.share * found.read_s + found.augment_s
    saves = now > CACHE_GAIN * later and now - later > CACHE_LEAST_S
    pays = saves and found.epochs < CACHE_EPOCHS
    t.reasons["cache"] = (
        f"{'auto' if pays else None}: a sample takes {now * 1e3:.3g} ms of one worker, {later * 1e3:.3g} where what is "
        f"the same each epoch is kept; that is {found.nbytes / 1e6:,.3g} MB, {found.share:.0%} of which fit"
    )
    return replace(s, cache="auto") if pays else s


def _persistent(t: Search, s: Setting) -> Setting:
    if "persistent_workers" not in t.knobs or not s.num_workers:
        return s
    try:
        size = s.batch_size or 1
        batches = len(t.loader) if s.batch_size == t.loader.batch_size else t.most_samples() / size
    except TypeError:
        t.reasons["persistent_workers"] = "False: an epoch without an end has no restart"
        return s
    if t.over():
        return s
    try:
        restart = t.restart_s(s)
    except TooSlow:
        t.reasons["persistent_workers"] = "False: there was no time to measure a restart"
        return s
    epoch = batches * t.of(s)[1].samples / t.seen[_plain(s)].rate
    share = restart / (restart + epoch)
    stay = share > RESTART_SHARE
    t.reasons["persistent_workers"] = (
        f"{stay}: starting workers anew takes {restart * 1e3:,.3g} ms, {share:.1%} of an epoch of {epoch:,.3g} s"
    )
    return replace(s, persistent_workers=stay)


def _curve(t: Search, s: Setting) -> tuple[Point, ...]:
    samples = t.of(s)[1].samples
    base = replace(_plain(s), worker_method=s.worker_method)
    if not s.num_workers:
        base = next((k for k in t.seen if k.num_workers), base)
    measured: dict[int, Seen] = {}
    own = t.seen.get(_plain(s))
    for k, v in t.seen.items():
        alike = replace(k, num_workers=1, prefetch_factor=2) == replace(base, num_workers=1, prefetch_factor=2)
        if alike and k.num_workers:
            other = measured.get(k.num_workers)
            if other is None or k == _plain(s) or (other is not own and other.rate < v.rate):
                measured[k.num_workers] = v
    none = next((v for k, v in t.seen.items() if not k.num_workers and k.batch_size == s.batch_size), None)
    if none is not None:
        measured[0] = none
    most = max(measured)
    counts = sorted({*measured, *(n for n in t.counts() if n <= 2 * most)})
    out = []
    for n in counts:
        seen = measured.get(n)
        low, high = interval(seen.rates) if seen else (None, None)
        predicted = t.model.rate(n) * samples if n and base.worker_method == "process" else None
        if seen:
            out.append(Point(n, seen.rate, low, high, predicted, len(seen.rates)))
        elif predicted is not None:
            out.append(Point(n, None, None, None, predicted, 0))
    return tuple(out)


def _guessed(t: Search, s: Setting) -> tuple[Guessed, ...]:
    samples = t.of(s)[1].samples
    window = t.seen[_plain(s)].window
    nbytes = window.nbytes if window is not None else 0
    device = accelerator()
    throughput = copy_rates(device, 64 << 20)[1] if device is not None else None
    batch = s.batch_size or round(samples)
    out = []
    best = t.seen[_plain(s)].rate
    for g in guesses(t.cores, len(resources.gpu_names()), max(1, batch), int(nbytes / max(1.0, samples)), throughput):
        if g.workers is None:
            out.append(Guessed(g, None, None, g.words))
            continue
        depth = s.prefetch_factor if s.num_workers else 2
        setting = Setting(g.workers, prefetch_factor=depth, batch_size=s.batch_size)
        bound = next((b for b in t.limits if b.most < g.workers and b.name != "cores"), None)
        if bound is not None:
            out.append(Guessed(g, None, None, f"not tried: {bound.words}"))
            continue
        if setting not in t.seen and g.workers <= 2 * t.limits[0].most and t.left() > 0.2 * t.budget_s:
            with contextlib.suppress(TooSlow):  # the time was over before it had warmed up
                t.measure(setting)
        if setting in t.seen:
            rate, how = t.seen[setting].rate, "measured"
        else:
            rate, how = _reckoned(t, setting) * samples, "model"
        out.append(Guessed(g, rate, rate / best, how))
    return tuple(out)


def _reckoned(t: Search, s: Setting) -> float:
    """Batches per second of a setting that was not measured: the model's, corrected by what it was wrong by at the
    nearest count that was."""
    alike = [k for k in t.seen if k.num_workers and k.worker_method == "process" and k.batch_size == s.batch_size]
    near = min(alike, key=lambda k: (abs(k.num_workers - s.num_workers), abs(k.prefetch_factor - s.prefetch_factor)))
    wrong = t.seen[near].rate / t.of(s)[1].samples / t.model.rate(near.num_workers)
    return t.model.rate(s.num_workers) * wrong


def _bound(t: Search, s: Setting) -> Limit | None:
    """The limit that kept the answer small: it is at its bound, and the curve still rose."""
    if s.num_workers != t.limits[0].most or s.num_workers < 2:
        return None
    counts = t.counts()
    before = replace(_plain(s), num_workers=counts[-2])
    rises = before not in t.seen or t.seen[_plain(s)].rate * KNEE > t.seen[before].rate
    return t.limits[0] if rises else None


def _lines(t: Search, s: Setting) -> tuple[dict[str, str], Setting]:
    theirs = s
    if s.worker_method == "thread":
        processes = [
            k for k in t.seen if k.worker_method == "process" and k.batch_size == s.batch_size and k.num_workers
        ]
        top = max(t.seen[k].rate for k in processes)
        best = min(
            (k for k in processes if t.seen[k].rate >= KNEE * top),
            key=lambda k: (k.num_workers, k.prefetch_factor),
        )
        theirs = replace(best, pin_memory=s.pin_memory, persistent_workers=s.persistent_workers, cache=s.cache)
    shuffle = any(n in type(t.loader.sampler).__name__ for n in ("RandomSampler", "Feistel", "Chunk"))
    return {
        "torch": f"DataLoader({_arguments(theirs, shuffle)})",
        "stoker": f"stoker.DataLoader({_arguments(s, shuffle, own=True)})",
    }, theirs


def _torch(t: Search, s: Setting) -> float | None:
    """Samples per second of torch's own loader, where there is time for it."""
    if t.streams or not s.num_workers or t.left() < max(2.0, 0.1 * t.budget_s) or not engine.SUPPORTED:
        return None
    t.rest()
    loader, tasks = t.of(s)
    kw: dict[str, Any] = {
        "num_workers": s.num_workers,
        "prefetch_factor": s.prefetch_factor,
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
    }
    endless = _Endless(tasks)
    kw["batch_sampler" if loader._auto_collation else "sampler"] = endless
    if not loader._auto_collation:
        kw["batch_size"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than torch suggests are what was found
        theirs: Any = torch.utils.data.DataLoader(loader.dataset, **kw)
    it = torch.utils.data.dataloader._MultiProcessingDataLoaderIter(theirs)
    try:
        for _ in range(2 * s.num_workers * s.prefetch_factor):
            next(it)
        began, count = time.monotonic(), 0
        while time.monotonic() - began < 2 * t.window_s() or count < TASKS * s.num_workers:
            next(it)
            count += 1
            if t.over() and count >= s.num_workers and time.monotonic() > t.deadline:
                break
        return count / (time.monotonic() - began) * tasks.samples
    finally:
        endless.over = True
        it._shutdown_workers()


class _Endless:
    def __init__(self, tasks: Tasks) -> None:
        self._tasks, self.over = tasks, False

    def __iter__(self) -> Any:
        while not self.over:
            yield self._tasks()


def _plain(s: Setting) -> Setting:
    """Without the knobs that no window measures."""
    return replace(s, pin_memory=False, persistent_workers=False, cache=None)


def _arguments(s: Setting, shuffle: bool, own: bool = False) -> str:
    out = ["stoker.Staged(dataset)" if s.cache else "dataset"]
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
