"""The report's first sentence: what came of the run, for a terminal, the page and JSON."""

from __future__ import annotations

from pathlib import PurePath

from ...core.terminal import human_seconds, short
from ..doctor.loader_stats import LoaderStats, filling_epochs, later_epochs
from .schema import Applied, Bypassing, LoaderChange, RunReport

NAMED_STARTUP = 0.1  # of the loop; from here the verdict mentions the time before first batches
SLOW_STARTUP = 0.15  # of the loop; from here a loader is not called fine
GAIN = 1.05  # from here the script is called faster; below 1 / GAIN it is called slower
LATER_GAIN = 1.5  # from here later epochs are named, if the script as a whole gained nothing


def headline(report: RunReport) -> str:
    """Returns one sentence without a full stop. After ``--apply``, it compares the script's time with that of before,
    and says what is estimated. Otherwise it gives the verdict.

    Example:
        "3.6 times as fast: train.py took 41.3 s and now takes 11.4 s; 53 cached samples were made again, and all were
        the same"
    """
    if not report.loaders:
        if report.bypassing:
            return bypassing_text(report.bypassing[0])
        if report.exit_code:
            return "the command failed before it iterated a DataLoader; its own error is above"
        return "no DataLoader was iterated in this run; run code that iterates one, for an epoch or some seconds"
    if report.applied is None:
        return f"{report.verdict}: {why(report)}"
    stale = next((s.cache.discarded for s in report.applied.settings.values() if s.cache.stale), "")
    if stale:
        return f"some samples may have been wrong: {stale}. Nothing was served from the cache after that"
    return _gain(report, report.applied)


def _gain(report: RunReport, applied: Applied) -> str:
    words = [word for word in report.command if not word.startswith("-")]  # python -m package.train
    scripts = [word for word in words if word.endswith(".py")]
    name = PurePath((scripts or words or ["the script"])[0]).name
    compared = applied.compared
    script = compared.script
    gain = script.times_as_fast()
    if gain is None or script.before is None or script.after is None:
        why = compared.notes[-1] if compared.notes else "no run without --apply is known to compare with"
        return f"{name} took {human_seconds(report.wall_s)}; {why}{_why_nothing_is_cached(applied)}"
    about = "about " if compared.estimated else ""
    both = f"{name} took {about}{human_seconds(script.before)} and now takes {human_seconds(script.after)}"
    if gain >= GAIN:
        return f"{about}{gain:.1f} times as fast: {both}{_checked(applied)}"
    later = max(compared.loaders, key=lambda row: row.later.times_as_fast() or 0.0, default=LoaderChange(""))
    later_gain = later.later.times_as_fast() or 0.0
    if later_gain >= LATER_GAIN and gain > 1 / GAIN:
        return f"later epochs of {short(later.name)} {about}{later_gain:.1f} times as fast, the whole not yet: {both}"
    verdict = "slower" if gain <= 1 / GAIN else "no gain"
    return f"{verdict}: {both}{_why_nothing_is_cached(applied)}"


def _checked(applied: Applied) -> str:
    # Loaders of one dataset share a cache, and each of them reports it.
    caches = {(c.kept, c.filled, c.nbytes, c.compared) for c in (s.cache for s in applied.settings.values())}
    n = sum(compared for *_, compared in caches)
    return f"; {n:,} cached samples were made again, and all were the same" if n > 1 else ""


def _why_nothing_is_cached(applied: Applied) -> str:
    why = [(name, s.cache.why_not) for name, s in applied.settings.items() if s.cache.why_not and not s.after.staged]
    if not why:
        return ""
    others_are = any(s.after.staged for s in applied.settings.values())
    return f"; nothing is cached{f' for {short(why[0][0])}' if others_are else ''}: {why[0][1]}"


def bypassing_text(b: Bypassing) -> str:
    """Describes a loader that does not run on stoker's engine."""
    unseen = "" if b.seen else ", and its batches were not counted"
    return f"{short(b.name)}: stoker's engine does not reach this loader{unseen}: {b.reason}"


def _waited(stats: LoaderStats) -> str:
    """Says how much of its loop a loader waits. If stoker filled a cache, only the epochs after that count, as in the
    verdict."""
    filled = filling_epochs(stats.loader)
    if filled:
        share = LoaderStats(later_epochs(stats.loader)).share
        first = "first epoch" if filled == 1 else f"first {filled} epochs"
        return f"after the {first}, which filled the cache, the loop waits for data {share:.0%} of its time"
    begins = stats.startup / stats.total if stats.total else 0.0
    if begins < NAMED_STARTUP:
        return f"the loop waits for data {stats.share:.0%} of its time"
    several = stats.loader.epochs > 1
    first, it = ("epochs' first batches take", "them") if several else ("the first batch takes", "it")
    return f"{first} {begins:.0%} of the loop's time; after {it}, the loop waits {stats.share:.0%} of its time"


def main_loader(report: RunReport) -> LoaderStats:
    """Returns the loader whose loop took the most time."""
    return LoaderStats(max(report.loaders, key=lambda loader: loader.busy_s))


def why(report: RunReport) -> str:
    """Explains the verdict in words."""
    stats = main_loader(report)
    waits = _waited(stats)
    if report.verdict == "unknown":
        return f"{stats.loader.batches} batches are too few to tell; let it run for more steps"
    if report.verdict == "transfer-bound":
        late = any(found.cause == "pageable_transfer" for found in report.findings)
        why = "its data reaches the device too late" if late else "the device waits for the script's own code"
        return f"{waits}, and {why}"
    if report.verdict == "healthy" and stats.startup < SLOW_STARTUP * stats.total:
        return f"your loader is fine, {waits}"
    return waits
