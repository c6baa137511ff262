"""The report as text: what was seen, the verdict, what to do, and, after ``--apply``, before and after."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from ...core.terminal import colour_wanted, human_seconds, printable, short, style, table, width
from ..doctor.loader_stats import LoaderStats, filling_epochs, later_epochs
from .before_after_text import applied_lines
from .money import sentences
from .patch import FIXED_BY_APPLY
from .ranks_text import rank_lines
from .schema import Bypassing, Faults, Finding, RunReport

COLOURS = {"healthy": "green", "input-bound": "red", "transfer-bound": "red", "unknown": "yellow"}
DIFF_COLOURS = {"+": "green", "-": "red", "@": "dim"}
MIN_COST = 0.005  # of the loop; a finding with a lower share costs something other than time
NAMED_STARTUP = 0.1  # of the loop; from here the verdict mentions the time before first batches
SLOW_STARTUP = 0.15  # of the loop; from here a loader is not called fine
MAX_DECISIONS = 5  # most changes by num_workers="auto" that are shown
MAX_TIMED = 3  # most loaders whose epoch times are shown
LOADER_HEADERS = ["loader", "workers", "batches", "waited", "of loop", "step", "samples/s"]


def render(report: RunReport, path: Path | None, stream: TextIO, columns: int = 0) -> str:
    """Renders the whole report as text that fits the stream. ``path`` is where the report was written, if it was."""
    colour, columns = colour_wanted(stream), columns or width(stream)
    report = _printable(report)

    def wrapped(text: str, indent: str = "") -> str:
        return textwrap.fill(text, columns, initial_indent=indent, subsequent_indent=indent + "  ")

    out = ["", style("stoker", "bold", colour) + _how_it_ended(report)]
    unreached = [wrapped(bypassing_text(b)) for b in report.bypassing]
    if report.loaders:
        out.append(table(LOADER_HEADERS, loader_rows(report), columns))
        out += [*unreached, wrapped(wall_clock(report)), *_workers(report)]
        out.append(f"verdict: {style(report.verdict, COLOURS[report.verdict], colour)}: {why(report)}")
        for finding in report.findings:
            lines = textwrap.wrap(finding_text(finding), columns - 2, subsequent_indent="  ")
            lines[0] = lines[0].replace(finding.cause, style(finding.cause, "bold", colour), 1)
            out += ["  " + line for line in lines]
        if report.money is not None:
            out += ["money:", *(wrapped(line, "  ") for line in sentences(report.money))]
        if report.ranks is not None:
            out += rank_lines(report.ranks, columns)
        if report.applied is not None:
            out += applied_lines(report.applied, columns, colour, stream)
        elif path is not None and apply_helps(report):
            out.append("try: stoker run --apply " + shlex.join(report.command))
        if report.diff:  # neither wrapped nor indented, so that it can be copied
            diff = [(line, DIFF_COLOURS.get(line[:1])) for line in report.diff.removesuffix("\n").split("\n")]
            out += ["", "the same in your own code:", *(style(line, c, colour) if c else line for line, c in diff)]
    else:
        out += unreached or ["no DataLoader was iterated in this run: nothing to say about data loading"]
    if path is not None:
        out.append(_last_line(report, path, columns))
    return "\n".join(out) + "\n"


def _printable(report: RunReport) -> RunReport:
    """Removes control characters from names, errors and settings. The diff keeps its tabs and newlines."""

    def clean(x: object) -> object:
        if isinstance(x, dict):
            return {clean(k): clean(v) for k, v in x.items()}
        if isinstance(x, list):
            return list(map(clean, x))
        return printable(re.sub(r"\s", " ", x)) if isinstance(x, str) else x

    diff = "".join(c if c in "\t\n" else printable(c) for c in report.diff)
    return msgspec.convert({**clean(report.as_dict()), "diff": diff}, RunReport)  # type: ignore[dict-item]


def _last_line(report: RunReport, path: Path, columns: int) -> str:
    """Returns where the report is and, if it fits into the line, the command that explains the first cause."""
    line = f"report: {printable(str(path))}"
    more = f"{line}; see stoker explain {report.findings[0].cause}" if report.findings else line
    return more if len(more) <= columns else line


def _how_it_ended(report: RunReport) -> str:
    code, text = report.exit_code, ""
    if code:
        text = f" (the command ended by signal {-code})" if code < 0 else f" (the command's exit code was {code})"
    return text + (" (incomplete: a process was killed before it reported)" if report.partial else "")


def bypassing_text(b: Bypassing) -> str:
    """Describes a loader that does not run on stoker's engine."""
    unseen = "" if b.seen else ", and its batches were not counted"
    return f"{short(b.name)}: stoker's engine does not reach this loader{unseen}: {b.reason}"


def wall_clock(report: RunReport) -> str:
    """Returns the wall-clock time of the script, and of the epochs of the loaders that took most of it."""
    out = [f"wall clock: the script took {human_seconds(report.wall_s)}"]
    for loader in sorted(report.loaders, key=lambda e: -e.loop_s)[:MAX_TIMED]:
        epochs = loader.epoch_s
        if epochs.first is None:
            continue
        text = f"the first epoch of {short(loader.name)} {human_seconds(epochs.first)}"
        if epochs.later is not None:
            text += f", later ones {human_seconds(epochs.later)} (median of {epochs.count - 1})"
        out.append(text)
    return "; ".join(out)


def loader_rows(report: RunReport) -> list[list[str]]:
    return [
        [
            short(e.name),
            f"{e.settings.num_workers}{' auto' if e.settings.auto else ''}",
            f"{e.batches:,}",
            human_seconds(e.wait_s),
            f"{e.wait_s / e.busy_s if e.busy_s else 0.0:.0%}",
            human_seconds(e.step_s / max(1, e.batches)),
            f"{e.samples_per_s:,.0f}",
        ]
        for e in report.loaders
    ]


def _workers(report: RunReport) -> list[str]:
    """Returns lines on each loader's worker memory, the decisions of "auto", and what failed."""
    out = []
    for loader in report.loaders:
        name, pss = short(loader.name), loader.memory.worker_pss
        if pss:
            each = "" if len(pss) == 1 else f"{len(pss)} x up to {max(pss) >> 20:,} MB, together "
            out.append(f"memory of {name}'s workers (PSS): {each}{sum(pss) >> 20:,} MB")
        out += [f"{name}: {text}" for text in (*loader.decisions[-MAX_DECISIONS:], *_faults(loader.faults))]
    return out


def _faults(faults: Faults) -> Iterator[str]:
    """Yields what failed without ending the run."""
    if faults.samples and faults.first:
        first = faults.first[0]
        file = f" ({first.file})" if first.file else ""
        listed = f"; all are in {faults.quarantine}" if faults.quarantine else ""
        yield (
            f"{faults.samples:,} samples could not be loaded; the first, sample {first.index!r}{file}: "
            f"{first.error}{listed}"
        )
    if faults.timeouts:
        yield f"{faults.timeouts:,} times a sample took longer than sample_timeout; its worker was replaced"
    if faults.deaths:
        yield f"{faults.deaths:,} workers died and were replaced; the last: {faults.died[-1]}"


def waited(report: RunReport) -> str:
    """Says how much of its loop the main loader waits. If stoker filled a cache, only the epochs after that count, as
    in the verdict."""
    stats = main_loader(report)
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
    return f"{first} {begins:.0%} of the loop's time, and after {it} it waits {stats.share:.0%}"


def main_loader(report: RunReport) -> LoaderStats:
    """Returns the loader whose loop took the most time."""
    return LoaderStats(max(report.loaders, key=lambda loader: loader.busy_s))


def why(report: RunReport) -> str:
    """Explains the verdict in words."""
    stats, waits = main_loader(report), waited(report)
    if report.verdict == "unknown":
        return f"{stats.loader.batches} batches are too few to tell; let it run for more steps"
    if report.verdict == "transfer-bound":
        late = any(found.cause == "pageable_transfer" for found in report.findings)
        why = "its data reaches the device too late" if late else "the device waits for the script's own code"
        return f"{waits}, and {why}"
    if report.verdict == "healthy" and stats.startup < SLOW_STARTUP * stats.total:
        return f"your loader is fine, {waits}"
    return waits


def finding_text(f: Finding) -> str:
    """Renders a finding as one paragraph, which begins with its cause."""
    if f.applied:
        what = "later epochs" if f.change.get("staged") else "the loop"
        gain = f"; {what} {f.measured_speedup:.2f}x" if f.measured_speedup else ""
        return f"{f.cause}, applied: {f.fix}{gain}"
    gain = f", predicted {f.predicted_speedup:.2f}x" if f.predicted_speedup else ""
    costs = f"costs {f.share:.0%} of the loop. " if f.share >= MIN_COST else ""
    return f"{f.cause}: {costs}{f.fix}{gain}"


def apply_helps(report: RunReport) -> bool:
    """Returns whether ``--apply`` could fix a finding. It never changes iterable datasets, whose shards depend on the
    number of workers."""
    streams = {loader.name for loader in report.loaders if loader.settings.iterable}
    return any(f.cause in FIXED_BY_APPLY and f.loader not in streams for f in report.findings)
