"""The report as text: the headline, what was done, what is left to do, and on request all details."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from ...core.terminal import colour_wanted, counted, human_seconds, printable, short, style, table, width
from .applied import epoch_bars, reasons, table_and_notes
from .headline import bypassing_text, headline, why
from .money import sentences
from .patch import FIXED_BY_APPLY
from .schema import Faults, Finding, LoaderReport, Ranks, RunReport

COLOURS = {"healthy": "green", "input-bound": "red", "transfer-bound": "red", "unknown": "yellow"}
DIFF_COLOURS = {"+": "green", "-": "red", "@": "dim"}
MIN_COST = 0.005  # of the loop; a finding with a lower share costs something other than time
MAX_FINDINGS = 5  # shown of those that were applied, and of the others
MAX_DECISIONS = 5  # most changes by num_workers="auto" that are shown
MAX_TIMED = 3  # most loaders whose epoch times are shown
MAX_RANKS = 16  # ranks in the table; if there are more, those that waited longest
LOADER_HEADERS = ["loader", "workers", "batches", "waited", "of loop", "step", "samples/s"]


def render(report: RunReport, path: Path | None, stream: TextIO, columns: int = 0, details: bool = False) -> str:
    """Renders the report as text that fits the stream: the headline first. ``path`` is where the report was written, if
    it was. ``details``: also all findings, counts and times, and where the figures come from."""
    page, report = _Page(columns or width(stream), colour_wanted(stream)), _printable(report)
    styles = {"stoker": "bold"}
    if report.loaders and report.applied is None:
        styles[report.verdict] = COLOURS[report.verdict]
    page.paragraph(f"stoker{_how_it_ended(report)}: {headline(report)}", styles=styles)
    for b in report.bypassing if report.loaders else report.bypassing[1:]:  # the headline has the first one then
        page.paragraph(bypassing_text(b))
    if report.loaders:
        page.loaders_and_findings(report, stream, details)
        page.costs_and_remarks(report, path)
        if details:
            page.details(report)
        page.diff(report.diff)
    if path is not None:
        line = f"report: {printable(str(path))}"
        more = f"{line}; see stoker explain {report.findings[0].cause}" if report.findings else line
        page.lines.append(more if len(more) <= page.columns else line)
    return "\n".join(page.lines) + "\n"


class _Page:
    """Lines of a report."""

    def __init__(self, columns: int, colour: bool) -> None:
        self.columns, self.colour = columns, colour
        self.lines = [""]

    def paragraph(self, text: str, indent: str = "", styles: Mapping[str, str] | None = None) -> None:
        """Adds a text. ``styles``: words, the first occurrence of which gets a style."""
        shown = textwrap.fill(text, self.columns, initial_indent=indent, subsequent_indent=indent + "  ")
        for word, name in (styles or {}).items():
            shown = shown.replace(word, style(word, name, self.colour), 1)
        self.lines.append(shown)

    def loaders_and_findings(self, report: RunReport, stream: TextIO, details: bool) -> None:
        if report.applied is None and report.verdict != "healthy" and not details:
            for loader in _longest(report):
                self.paragraph(_in_short(loader), "  ")
        for loader in report.loaders:
            for fault in _faults(loader.faults):
                self.paragraph(f"{short(loader.name)}: {fault}")
        most = None if details else MAX_FINDINGS
        left = [f for f in report.findings if not f.applied]
        self.findings([f for f in report.findings if f.applied], most)
        if report.applied is not None:
            self.lines += epoch_bars(report.applied, self.columns, self.colour, stream)
            if details or report.verdict != "healthy" or left:
                text = f"what is left: {report.verdict}: {why(report)}"
                self.paragraph(text, styles={report.verdict: COLOURS[report.verdict]})
        self.findings(left, most)

    def findings(self, findings: Sequence[Finding], most: int | None) -> None:
        shown = findings[:most]
        for finding in shown:
            self.paragraph(finding_text(finding), "  ", {finding.cause: "bold"})
        if len(shown) < len(findings):
            self.paragraph(f"{len(findings) - len(shown)} more: stoker run --details", "  ")

    def costs_and_remarks(self, report: RunReport, path: Path | None) -> None:
        if report.money is not None:
            self.lines.append("money:")
            for line in sentences(report.money):
                self.paragraph(line, "  ")
        if report.ranks is not None:
            self.lines += rank_lines(report.ranks, self.columns)
        if report.applied is not None:
            for reason in reasons(report.applied):
                self.paragraph(reason)
        elif path is not None and apply_helps(report):
            self.lines.append("try: stoker run --apply " + shlex.join(report.command))

    def details(self, report: RunReport) -> None:
        self.lines += ["", table(LOADER_HEADERS, loader_rows(report), self.columns)]
        self.paragraph(wall_clock(report))
        self.lines += _workers(report)
        if report.applied is not None:
            self.lines += table_and_notes(report.applied, self.columns, self.colour)

    def diff(self, diff: str) -> None:
        """Adds the diff, neither wrapped nor indented, so that it can be copied."""
        if diff:
            lines = diff.removesuffix("\n").split("\n")
            shown = [style(line, DIFF_COLOURS.get(line[:1], "none"), self.colour) for line in lines]
            self.lines += ["", "the same in your own code:", *shown]


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


def _how_it_ended(report: RunReport) -> str:
    code, text = report.exit_code, ""
    if code:
        text = f" (the command ended by signal {-code})" if code < 0 else f" (the command's exit code was {code})"
    return text + (" (incomplete: a process was killed before it reported)" if report.partial else "")


def wall_clock(report: RunReport) -> str:
    """Returns the wall-clock time of the script, and of the epochs of the loaders that took most of it."""
    out = [f"wall clock: the script took {human_seconds(report.wall_s)}"]
    for loader in _longest(report):
        epochs = loader.epoch_s
        if epochs.first is None:
            continue
        text = f"the first epoch of {short(loader.name)} {human_seconds(epochs.first)}"
        if epochs.later is not None:
            text += f", later ones {human_seconds(epochs.later)} (median of {epochs.count - 1})"
        out.append(text)
    return "; ".join(out)


def _longest(report: RunReport) -> list[LoaderReport]:
    return sorted(report.loaders, key=lambda loader: -loader.loop_s)[:MAX_TIMED]


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


def _in_short(loader: LoaderReport) -> str:
    """Returns a loader's row of the table as a phrase."""
    workers = counted(loader.settings.num_workers, "worker")
    times = f"waited {human_seconds(loader.wait_s)} of {human_seconds(loader.busy_s)}"
    return f"{short(loader.name)}: {workers}, {loader.samples_per_s:,.0f} samples/s, {times}"


def _workers(report: RunReport) -> list[str]:
    """Returns lines on each loader's worker memory, and the decisions of "auto"."""
    out = []
    for loader in report.loaders:
        name, pss = short(loader.name), loader.memory.worker_pss
        if pss:
            each = "" if len(pss) == 1 else f"{len(pss)} x up to {max(pss) >> 20:,} MB, together "
            out.append(f"memory of {name}'s workers (PSS): {each}{sum(pss) >> 20:,} MB")
        out += [f"{name}: {text}" for text in loader.decisions[-MAX_DECISIONS:]]
    return out


def _faults(faults: Faults) -> Iterator[str]:
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


def rank_lines(ranks: Ranks, columns: int) -> list[str]:
    """Returns a table of what each rank waited, followed by ``rank_sentences``."""
    longest = sorted(ranks.each, key=lambda r: -r.wait_s)[:MAX_RANKS]
    rows = []
    for r in sorted(longest, key=lambda r: r.rank):
        busy_s, batches = r.wait_s + r.step_s, max(1, r.batches)
        share = f"{r.wait_s / busy_s if busy_s else 0.0:.0%}"
        rows.append([f"{r.rank}", f"{r.batches:,}", human_seconds(r.wait_s), share, human_seconds(r.step_s / batches)])
    out = ["", table(["rank", "batches", "waited", "of loop", "step"], rows, columns)]
    if len(ranks.each) > MAX_RANKS:
        out.append(f"of {len(ranks.each)} ranks those that waited longest")
    return out + [textwrap.fill(text, columns, subsequent_indent="  ") for text in rank_sentences(ranks)]


def rank_sentences(ranks: Ranks | None) -> Iterator[str]:
    """Yields sentences on loaders with unequal numbers of batches, and on the rank that makes the others wait."""
    if ranks is None:
        return
    for loader in ranks.unequal:
        least = min(loader.batches, key=lambda pair: pair[1])
        most = max(loader.batches, key=lambda pair: pair[1])
        yield (
            f"{short(loader.loader)}: ranks have unequal numbers of batches in an epoch: rank {least[0]} has "
            f"{least[1]:,}, rank {most[0]} {most[1]:,}. A collective in the loop then waits for ever. Use a "
            "DistributedSampler, or drop_last=True on equal shares"
        )
    if ranks.starving is not None:
        waits = {r.rank: r.wait_s / max(1, r.batches) for r in ranks.each}
        own = waits.pop(ranks.starving)
        yield (
            f"rank {ranks.starving} starves the others: it waits {human_seconds(own)} for a batch, they at most "
            f"{human_seconds(max(waits.values()))}, and then for it"
        )
