"""Before and after ``--apply``, in wall-clock time: of the script, first and later epochs, and each loader's loop.

"Before" is an observed run of the same command, if one is remembered. Otherwise it is estimated from the first epoch of
the applied run, in which the cache serves nothing yet: each later epoch would have taken as long, without the warm-up
of the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from . import schema

MOST_OWN = 0.5  # share of the first epoch


def compare(
    wall_s: float,
    loaders: Sequence[schema.LoaderReport],
    settings: Mapping[str, schema.AppliedSettings],
    before: schema.RememberedRun | None,
    script: str,
    ended: bool = True,
) -> schema.Compared:
    """Compares a run with the one before ``--apply``. ``ended``: the script came to its own end, so that its total can
    be compared."""
    out = _compared(wall_s, loaders, settings, before, script)
    if not ended and out.script.before is not None:
        out.script.before = None
        out.notes.append("this run ended early, so it has no total to compare")
    return out


def _compared(
    wall_s: float,
    loaders: Sequence[schema.LoaderReport],
    settings: Mapping[str, schema.AppliedSettings],
    before: schema.RememberedRun | None,
    script: str,
) -> schema.Compared:
    cost = schema.Cost(
        trials_s=sum(changed.measured_s for changed in settings.values()),
        fill_s=sum(changed.cache.fill_s for changed in settings.values()),
    )
    if before is not None:
        total = schema.Change(before.wall_s if before.complete else None, wall_s)
        return schema.Compared(
            False, total, [_measured(e, before) for e in loaders], list(_notes(before, script)), cost
        )
    rows, saved_s, estimated = [], 0.0, False
    for loader in loaders:
        changed = settings.get(loader.name)
        first_s = None if changed is None else _first_epoch_without_stoker(loader, changed)
        if first_s is None:
            rows.append(_row(loader, schema.EpochTimes(), None))
            continue
        now = loader.epoch_s
        warm_up_s = loader.by_epoch[0].warm_up_s if loader.by_epoch else 0.0
        later_s = first_s - warm_up_s if warm_up_s < first_s else first_s
        each = [first_s, *([later_s] * (len(now.each) - 1))]
        saved = sum(each) - sum(now.each)
        rate = loader.samples / (loader.loop_s + saved) if loader.loop_s + saved > 0 else None
        rows.append(_row(loader, schema.EpochTimes(first=first_s, later=later_s, each=each), rate))
        saved_s, estimated = saved_s + saved, True
    return schema.Compared(True, schema.Change(wall_s + saved_s if estimated else None, wall_s), rows, [], cost)


def _measured(loader: schema.LoaderReport, before: schema.RememberedRun) -> schema.LoaderChange:
    old = next((other for other in before.loaders if other.name == loader.name), None)
    if old is None and len(before.loaders) == 1:  # assume that its line has moved
        old = before.loaders[0]
    return _row(loader, old.epoch_s, old.samples_per_s) if old is not None else _row(loader, schema.EpochTimes(), None)


def _first_epoch_without_stoker(loader: schema.LoaderReport, changed: schema.AppliedSettings) -> float | None:
    """Estimates the seconds that the first epoch would have taken without trials and without filling a cache. None if
    nothing was cached, if there was no later epoch, or if most of the first one was stoker's own work."""
    now, cache = loader.epoch_s, changed.cache
    if not (cache.filled or changed.after.staged) or now.later is None or now.first is None:
        return None
    if cache.from_earlier_runs:  # nothing was made as without stoker
        return None
    spent = changed.measured_s + cache.fill_s / max(1, loader.settings.num_workers)
    return now.first - spent if spent < MOST_OWN * now.first else None


def _row(loader: schema.LoaderReport, before: schema.EpochTimes, rate: float | None) -> schema.LoaderChange:
    now = loader.epoch_s
    return schema.LoaderChange(
        loader.name,
        first=schema.Change(before.first, now.first),
        later=schema.Change(before.later, now.later),
        samples_per_s=schema.Change(rate, loader.samples_per_s),
        each=schema.EachEpoch(before.each, now.each),
    )


def _notes(before: schema.RememberedRun, script: str) -> Iterable[str]:
    if before.script != script:
        yield "the script has been edited since the observed run"
    if not before.complete:
        yield "the observed run was ended early, so it has no total to compare with"
