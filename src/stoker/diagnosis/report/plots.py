"""The plots of the HTML page: stacked bars on one scale, each part with a title that shows its value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...core.terminal import human_seconds, short
from .schema import Compared, LoaderReport, RunReport

KINDS = {
    "decode": "#d97706",
    "transform": "#2563eb",
    "collate": "#059669",
    "fetch": "#64748b",
    "cache": "#0d9488",
    "waiting": "#c026d3",
    "transport": "#0891b2",
}
# These differ in brightness, so they can be told apart without colour.
WAIT, STEP, FIRST = "#ea580c", "#2563eb", "#f59e0b"
BEFORE, AFTER = "#a1a1aa", "#15803d"
MOST_PACES = 4  # most loaders whose epochs are drawn before and after


class BarPart(NamedTuple):
    name: str
    value: float
    colour: str


class Plot(NamedTuple):
    """Stacked bars on one scale. Each row is a bar's label and its parts."""

    title: str
    unit: str
    rows: list[tuple[str, list[BarPart]]]

    @property
    def top(self) -> float:
        """The length of the longest bar."""
        return max(sum(part.value for part in parts) for _, parts in self.rows) or 1.0

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Each part's colour and text. With a single bar, the text includes the value."""
        if len(self.rows) == 1:
            return [(part.colour, f"{part.name}: {part.value:.3g} {self.unit}") for part in self.rows[0][1]]
        return list(dict.fromkeys((part.colour, part.name) for _, parts in self.rows for part in parts))


def picture(report: RunReport) -> Plot | None:
    """Returns the main plot: before and after ``--apply`` if it ran and both are known. Otherwise a batch now and as
    predicted once the first finding with a prediction is fixed."""
    if report.applied is not None and report.applied.compared.script.times_as_fast():
        return _applied(report.applied.compared)
    if not report.loaders:
        return None
    found = next((f for f in report.findings if f.predicted_speedup and not f.applied), None)
    name = found.loader if found else ""
    loader = next((e for e in report.loaders if e.name == name), max(report.loaders, key=lambda e: e.busy_s))
    if not loader.busy_s:
        return None
    wait, step = (seconds / max(1, loader.batches) for seconds in (loader.wait_s, loader.step_s))
    rows = [(f"now: {human_seconds(wait + step)}", _two(wait, step))]
    if found is not None and found.predicted_speedup:
        then = (wait + step) / found.predicted_speedup
        rows.append((f"predicted: {human_seconds(then)}", _two(then - step, min(step, then))))
    return Plot(f"A batch of {short(loader.name)}" + (f", now and without {found.cause}" if found else ""), "ms", rows)


def _two(wait: float, step: float) -> list[BarPart]:
    parts = [BarPart("the step", step * 1e3, STEP), BarPart("waiting for data", wait * 1e3, WAIT)]
    return [part for part in parts if part.value > 0]


def _applied(compared: Compared) -> Plot:
    main = max(compared.loaders, key=lambda row: sum(row.each.after), default=None)
    changes = [("script", compared.script)]
    if main is not None and main.later.times_as_fast():
        changes.append(("later epochs", main.later))
    guess = " (estimate)" if compared.estimated else ""
    rows = []
    for name, change in changes:
        for when, figure, colour in ((f"before{guess}", change.before, BEFORE), ("after", change.after, AFTER)):
            seconds = figure or 0.0
            rows.append((f"{name} {when}: {human_seconds(seconds)}", [BarPart(when, seconds, colour)]))
    return Plot("Before and after", "s", rows)


def loop(loader: LoaderReport) -> Iterator[Plot]:
    """Plots where a batch's time goes, and where a task's time goes."""
    batches, first = max(1, loader.batches), loader.stages.startup.wait_s
    parts = [
        BarPart("waiting for data", max(0.0, loader.wait_s - first), WAIT),
        BarPart("waiting for an epoch's first batch", first, FIRST),
        BarPart("the step", loader.step_s, STEP),
    ]
    shown = [part._replace(value=part.value / batches * 1e3) for part in parts if part.value]
    yield Plot("Where a batch's time goes", "ms", [("", shown)])
    if loader.looks:
        shares = {("waiting", KINDS["waiting"]): 100 * sum(code.waited for code in loader.where)}
        for code in loader.where:
            key = f"{code.kind}: {code.name}", KINDS.get(code.kind, "#888888")
            shares[key] = shares.get(key, 0.0) + code.ran * 100
        task = [BarPart(name, share, colour) for (name, colour), share in shares.items() if share]
        yield Plot("Where a worker's time goes", "%", [("", sorted(task, key=lambda part: -part.value))])


def epochs(loader: LoaderReport) -> Iterator[Plot]:
    """Plots each epoch's time, if there was more than one epoch."""
    if len(loader.by_epoch) > 1:
        rows = []
        for i, e in enumerate(loader.by_epoch):
            waits = [BarPart("first batch", e.first_wait_s, FIRST), BarPart("waiting", e.later_wait_s, WAIT)]
            rows.append((f"epoch {i + 1}", [*waits, BarPart("steps", e.step_s, STEP)]))
        yield Plot(f"Epoch by epoch, {short(loader.name)}", "s", rows)


def paces(compared: Compared) -> Iterator[Plot]:
    """Plots the seconds of each epoch, before and after ``--apply``."""
    name = "before (estimate)" if compared.estimated else "before"
    for row in compared.loaders[:MOST_PACES]:
        both = ((name, row.each.before, BEFORE), ("after", row.each.after, AFTER))
        if len(row.each.after) > 1:
            count = range(max(len(seconds) for _, seconds, _ in both))
            rows = [(f"epoch {i + 1}", [BarPart(what, s[i], c)]) for i in count for what, s, c in both if i < len(s)]
            yield Plot(f"Seconds per epoch, {short(row.name)}", "s", rows)
