"""What ``stoker run --apply`` did in this run: before and after in wall-clock time, findings, and both as text.

"Before" is an observed run of the same command, if one is remembered. Otherwise it is estimated from the first epoch of
the applied run, in which the cache serves nothing yet: each later epoch would have taken as long, without the warm-up
of the first step.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

import msgspec

from ...core.terminal import human_bytes, human_seconds, short, style, table
from ...core.types import JsonObject
from . import schema
from .schema import Applied, AppliedSettings, EpochTimes, Finding, LoaderChange, LoaderReport, RememberedRun

ENGINE = {"engine": "stoker"}  # in a diff of the user's code: stoker.DataLoader
MOST_OWN = 0.5  # share of the first epoch
NAMED = 4  # most loaders in the table: those whose epochs took longest
EPOCHS = 6  # most epochs drawn; if there are more, the first ones and the last
LABEL, VALUE = 16, 12  # columns before and after a bar
EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"


def compare(
    wall_s: float,
    loaders: Sequence[LoaderReport],
    settings: Mapping[str, AppliedSettings],
    before: RememberedRun | None,
    script: str,
    ended: bool = True,
) -> schema.Compared:
    """Compares the script, its epochs and each loader's loop with those before ``--apply``. ``ended``: the script came
    to its own end, so that its total can be compared."""
    cost = schema.Cost(
        trials_s=sum(changed.measured_s for changed in settings.values()),
        fill_s=sum(changed.cache.fill_s for changed in settings.values()),
    )
    if before is not None:
        rows = [_measured(loader, before) for loader in loaders]
        notes = list(_notes(before, script))
        total_s = before.wall_s if before.complete else None
    else:
        estimates = [_estimated(loader, settings.get(loader.name)) for loader in loaders]
        rows, notes = [row for row, _ in estimates], []
        saved = [saved_s for _, saved_s in estimates if saved_s is not None]
        total_s = wall_s + sum(saved) if saved else None
    if total_s is not None and not ended:
        total_s = None
        notes.append("this run ended early, so it has no total to compare")
    return schema.Compared(before is None, schema.Change(total_s, wall_s), rows, notes, cost)


def _measured(loader: LoaderReport, before: RememberedRun) -> LoaderChange:
    old = next((other for other in before.loaders if other.name == loader.name), None)
    if old is None and len(before.loaders) == 1:  # assume that its line has moved
        old = before.loaders[0]
    return _row(loader) if old is None else _row(loader, old.epoch_s, old.samples_per_s)


def _estimated(loader: LoaderReport, changed: AppliedSettings | None) -> tuple[LoaderChange, float | None]:
    """Compares a loader with an estimate. Also returns the seconds that all epochs saved; None if unknown."""
    first_s = None if changed is None else _first_epoch_without_stoker(loader, changed)
    if first_s is None:
        return _row(loader), None
    now = loader.epoch_s
    warm_up_s = loader.by_epoch[0].warm_up_s if loader.by_epoch else 0.0
    later_s = first_s - warm_up_s if warm_up_s < first_s else first_s
    each = [first_s, *([later_s] * (len(now.each) - 1))]
    saved_s = sum(each) - sum(now.each)
    rate = loader.samples / (loader.loop_s + saved_s) if loader.loop_s + saved_s > 0 else None
    return _row(loader, EpochTimes(first=first_s, later=later_s, each=each), rate), saved_s


def _first_epoch_without_stoker(loader: LoaderReport, changed: AppliedSettings) -> float | None:
    """Estimates the seconds that the first epoch would have taken without trials and without filling a cache. None if
    nothing was cached, if there was no later epoch, or if most of the first one was stoker's own work."""
    now, cache = loader.epoch_s, changed.cache
    if not (cache.filled or changed.after.staged) or now.later is None or now.first is None:
        return None
    if cache.from_earlier_runs:  # nothing was made as without stoker
        return None
    spent = changed.measured_s + cache.fill_s / max(1, loader.settings.num_workers)
    return now.first - spent if spent < MOST_OWN * now.first else None


def _row(loader: LoaderReport, before: EpochTimes | None = None, rate: float | None = None) -> LoaderChange:
    before, now = before or EpochTimes(), loader.epoch_s
    return LoaderChange(
        loader.name,
        first=schema.Change(before.first, now.first),
        later=schema.Change(before.later, now.later),
        samples_per_s=schema.Change(rate, loader.samples_per_s),
        each=schema.EachEpoch(before.each, now.each),
    )


def _notes(before: RememberedRun, script: str) -> Iterator[str]:
    if before.script != script:
        yield "the script has been edited since the observed run"
    if not before.complete:
        yield "the observed run was ended early, so it has no total to compare with"


def findings(applied: Applied) -> list[Finding]:
    """Returns one finding for each thing done for a loader, largest speed-up first. Stale caches come before all."""
    rows = {row.name: row for row in applied.compared.loaders}
    known = [(name, settings, rows[name]) for name, settings in applied.settings.items() if name in rows]
    found = [rule(*loader) for loader in known for rule in (_cached, _collated, _workers)]
    done = sorted(filter(None, found), key=lambda f: -(f.measured_speedup or 0.0))
    return [*filter(None, map(_stale, applied.settings, applied.settings.values())), *done]


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


def epoch_bars(applied: Applied, columns: int, colour: bool, stream: TextIO) -> list[str]:
    """Returns bars of the seconds per epoch, of the loader whose epochs took longest. They are ASCII if the stream
    cannot show block characters."""
    compared = applied.compared
    main = max(compared.loaders, key=lambda row: sum(row.each.after), default=None)
    if main is None or len(main.each.after) < 2:
        return []
    estimate = ", before is an estimate" if main.each.before and compared.estimated else ""
    drawn = bars(main.each.before, main.each.after, columns, colour, stream)
    return ["", f"seconds per epoch, {short(main.name)}{estimate}", *drawn, ""]


def table_and_notes(applied: Applied, columns: int, colour: bool) -> list[str]:
    """Returns the table of wall-clock times, and where its figures come from."""
    headers, figures = rows(applied.compared)
    title = style("before / after" if len(headers) > 2 else "after", "bold", colour)
    out = ["", title, table(headers, figures, columns)]
    return out + [textwrap.fill(note, columns, subsequent_indent="  ") for note in notes(applied)]


def rows(compared: schema.Compared) -> tuple[list[str], list[list[str]]]:
    """Returns the table's header and rows. Without any figure from before, that column is left out."""
    known = compared.script.before is not None or not compared.estimated
    figures = [("the script", compared.script, False)]
    for row in sorted(compared.loaders, key=lambda row: -sum(row.each.after))[:NAMED]:
        name, later = short(row.name), len(row.each.after) - 1
        figures.append((f"{name}: first epoch", row.first, False))
        figures.append((f"{name}: each later epoch" + (f" ({later})" if later > 0 else ""), row.later, False))
        figures.append((f"{name}: samples/s of its loop", row.samples_per_s, True))
    out = []
    for label, change, rate in figures:
        if change.after is not None:
            both = (change.before, change.after)
            cells = ["" if x is None else f"{x:,.0f}" if rate else human_seconds(x) for x in both]
            gain = change.times_as_fast(rate)
            out.append([label, *cells, f"{gain:.2f}x" if gain else ""] if known else [label, cells[1]])
    before = "before (estimate)" if compared.estimated else "before"
    return (["wall clock", before, "after", ""] if known else ["wall clock", "after"]), out


def notes(applied: Applied) -> Iterator[str]:
    """Yields sentences on where the figures come from."""
    compared = applied.compared
    if compared.estimated and compared.script.before is not None:
        yield (
            "before is an estimate: no observed run of this command is known, so each epoch is taken to last as long "
            "as the first one of this run, in which nothing was served from the cache; the warm-up of its first step "
            "is left out"
        )
    elif compared.estimated:
        yield "no observed run of this command is known to compare with: stoker run, without --apply, makes one"
    spent = [(compared.cost.trials_s, "before first batches"), (compared.cost.fill_s, "in workers to store samples")]
    parts = [f"{human_seconds(seconds)} {what}" for seconds, what in spent if seconds]
    if parts:
        yield "what stoker itself cost is in these figures: " + " and ".join(parts)
    for name, settings in applied.settings.items():
        if settings.reason:
            yield f"{short(name)}: {settings.reason}"


def reasons(applied: Applied) -> Iterator[str]:
    """Yields what qualifies the comparison, and why nothing is cached, by loader."""
    yield from applied.compared.notes
    for name, settings in applied.settings.items():
        cache = settings.cache
        if cache.discarded:
            yield f"{short(name)}: the cache was discarded: {cache.discarded}"
        elif cache.why_not and not settings.after.staged:
            what = "no part of a sample" if cache.collate else "nothing"
            yield f"{short(name)}: {what} is cached: {cache.why_not}"


def bars(before: Sequence[float], after: Sequence[float], columns: int, colour: bool, stream: TextIO) -> list[str]:
    """Draws the seconds per epoch as bars on one scale: two for each epoch, or one if only one value is known."""
    count = max(len(before), len(after))
    longest = max([*before, *after], default=0.0)
    if not count or longest <= 0:
        return []
    blocks = (getattr(stream, "encoding", None) or "").lower().replace("-", "").startswith("utf")
    room = max(8, columns - LABEL - VALUE)
    out = []
    for i in range(count):
        if EPOCHS <= i + 1 < count:
            continue
        label = f"epoch {i + 1}"
        for name, values, tint in (("before", before, "red"), ("after", after, "green")):
            if i < len(values):
                bar = style(_bar(values[i] / longest * room, blocks), tint, colour)
                out.append(f"{label:<9}{name:<7}{bar} {human_seconds(values[i])}")
                label = ""
    return out


def _bar(length: float, blocks: bool) -> str:
    """Returns a bar of ``length`` columns, at least a sliver."""
    if not blocks:
        return "#" * max(1, int(length))
    eighths = max(1, int(length * 8))
    return "\u2588" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
