"""What ``stoker run --apply`` did in this run, as findings, which are listed before those that remain."""

from __future__ import annotations

import os

import msgspec

from ...core.terminal import human_bytes
from ...core.types import JsonObject
from .schema import Applied, AppliedSettings, Finding, LoaderChange

ENGINE = {"engine": "stoker"}  # in a diff of the user's code: stoker.DataLoader


def findings(applied: Applied) -> list[Finding]:
    """Returns one finding for each thing done for a loader, largest speed-up first. Stale caches come before all."""
    found: list[Finding] = []
    rows = {row.name: row for row in applied.compared.loaders}
    for name, settings in applied.settings.items():
        if name in rows:
            found += [f for f in (rule(name, settings, rows[name]) for rule in (_cached, _collated, _workers)) if f]
    found.sort(key=lambda f: -(f.measured_speedup or 0.0))
    return [*filter(None, map(_stale, applied.settings, applied.settings.values())), *found]


def _stale(name: str, settings: AppliedSettings) -> Finding | None:
    """A cached sample differed from what the script makes; nothing matters more."""
    cache = settings.cache
    if not cache.stale:
        return None
    text = f"some samples may have been wrong: {cache.discarded}. Nothing was served from the cache after that"
    return Finding("stale_cache", 0.0, msgspec.to_builtins(cache), text, loader=name)


def _cached(name: str, settings: AppliedSettings, row: LoaderChange) -> Finding | None:
    """The deterministic part is served from memory."""
    cache = settings.cache
    if not settings.after.staged or cache.discarded:
        return None
    here = os.getcwd() + os.sep  # paths below it are shown relative, as in a loader's name
    kept, cut = cache.kept.replace(here, ""), cache.cut.replace(here, "")
    text = f"stoker caches {kept or 'what is the same in every epoch'}"
    if cut and cut not in kept:
        text += f", up to {cut}"
    if cache.filled:
        of = f"of {cache.samples:,} " if cache.samples else ""
        what = "results of calls" if cache.calls else f"{of}samples"
        text += f": {cache.filled:,} {what}, {human_bytes(cache.nbytes)}"
    if cache.from_earlier_runs:
        text += f", {cache.from_earlier_runs:,} of them from earlier runs"
    if cache.why_not_kept:
        text += f"; none is kept for the next run: {cache.why_not_kept}"
    if cache.why_not:
        text += f"; not more, because {cache.why_not}"
    return Finding(
        "cacheable_prefix",
        0.0,
        msgspec.to_builtins(cache),
        text,
        change={"staged": True, **_count(settings), **ENGINE},
        loader=name,
        applied=True,
        measured_speedup=row.later.times_as_fast(),
    )


def _collated(name: str, settings: AppliedSettings, row: LoaderChange) -> Finding | None:
    """The collate function's results for single samples are served from memory."""
    calls = settings.cache.collate.replace(os.getcwd() + os.sep, "")
    if not calls:
        return None
    text = f"stoker keeps what collate_fn makes of single samples: {calls}"
    gain = None if settings.after.staged else row.later.times_as_fast()
    return Finding("slow_collate", 0.0, {"calls": calls}, text, loader=name, applied=True, measured_speedup=gain)


def _count(settings: AppliedSettings) -> JsonObject:
    """Returns the number of workers as a setting, if it was changed; else an empty dict."""
    new = settings.after.num_workers
    return {} if new is None or new == settings.before.num_workers else {"num_workers": new}


def _workers(name: str, settings: AppliedSettings, row: LoaderChange) -> Finding | None:
    """The number of workers was changed."""
    changed, old = _count(settings), settings.before.num_workers or 0
    if not changed:
        return None
    new = changed["num_workers"]
    return Finding(
        "too_many_workers" if new < old else "too_few_workers" if old else "main_process_loading",
        0.0,
        {"from": msgspec.to_builtins(settings.before), "to": changed},
        f"num_workers={new} (was {old})",
        change={**changed, **ENGINE},
        loader=name,
        applied=True,
        measured_speedup=None if settings.after.staged else row.samples_per_s.times_as_fast(rate=True),
    )
