"""Compares two reports of ``stoker run``, the second as ratios to the first.

Reports are untrusted input: msgspec checks their types, and ``figures`` checks that the compared numbers are plausible.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Struct, field

from ...core.errors import UsageError
from ...core.terminal import human_bytes, human_seconds, printable, rate, short, style, table
from ...core.types import JsonObject
from .schema import SCHEMA, LoaderReport, RunReport, Stages

MAX_BYTES = 64 << 20  # of a file; a report has a few kilobytes
MAX_NUMBER = 1e15  # no time, memory size or count gets this large
MAX_TEXT = 200  # characters of a text that is shown
FEW = 5  # batches; with fewer a ratio is noise
NAME = 40  # characters of a loader's name that fit into a table of 80 columns
EXACT = 1e-9  # tolerance for rounding: 95 of 100 is not more than 5 % fewer
MEMORY = 0.05  # machines whose memory differs by less count as the same


class Figure(NamedTuple):
    """A number that is compared between loaders: seconds per batch, bytes, or a rate. ``of`` returns None if it is
    unknown."""

    label: str
    text: Callable[[float], str]
    of: Callable[[LoaderReport], float | None]


def _over(b: float, a: float) -> float | None:
    return b / a if a > 1e-12 else None  # too small to be a measurement


def _of_a_task(label: str, seconds: Callable[[Stages], float]) -> Figure:
    return Figure(label, human_seconds, lambda e: _over(seconds(e.stages), e.stages.worker.tasks))


FIGURES = {
    "samples_per_s": Figure("samples/s", rate, lambda e: e.samples_per_s if e.samples else None),
    "wait_share": Figure("waiting, of the loop", "{:.0%}".format, lambda e: _over(e.wait_s, e.busy_s)),
    "loop_s": Figure("loop, a batch", human_seconds, lambda e: _over(e.busy_s, e.batches)),
    "wait_s": Figure("  waiting", human_seconds, lambda e: _over(e.wait_s, e.batches)),
    "step_s": Figure("  step", human_seconds, lambda e: _over(e.step_s, e.batches)),
    "fetch_s": _of_a_task("worker, a batch: fetch", lambda stages: stages.fetch.self_s),
    "collate_s": _of_a_task("  collate", lambda stages: stages.collate.self_s),
    "transport_s": _of_a_task("  transport", lambda stages: stages.transport.self_s),
    "worker_cpu_s": _of_a_task("  CPU", lambda stages: stages.worker.cpu_s),
    "consumer_cpu_s": Figure("CPU of a step", human_seconds, lambda e: _over(e.stages.consumer.cpu_s, e.batches)),
    "startup_s": Figure("first batch", human_seconds, lambda e: _over(e.stages.startup.wait_s, e.epochs)),
    "workers_bytes": Figure("memory of workers", human_bytes, lambda e: sum(e.memory.worker_pss) or None),
    "batch_bytes": Figure("largest batch", human_bytes, lambda e: e.memory.batch_bytes or None),  # 0: not measured
}


class ReportGpu(Struct):
    name: str


class ReportMachine(Struct):
    """The parts of a report's machine that are compared."""

    cores: int | None = None
    memory: int | None = None
    gpus: list[ReportGpu] = []
    python: str | None = None


class LoadedReport(RunReport):
    """A report and the path it was read from."""

    machine: ReportMachine = field(default_factory=ReportMachine)  # type: ignore[assignment]
    path: str = ""

    @property
    def causes(self) -> dict[str, float]:
        """Each finding's cause and its share of the loop; a cause's largest share if several findings name it."""
        return {finding.cause: finding.share for finding in sorted(self.findings, key=lambda f: f.share)}


class ReportHead(Struct):
    """The keys that reports of all schemas have."""

    schema: Annotated[int, msgspec.Meta(ge=1, le=1000)]
    loaders: list[object]


def load(path: Path) -> LoadedReport:
    """Reads a report from a file. Raises UsageError if it cannot be read, is too large, or fails as in ``parse``."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror or e}") from e
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path} is larger than {MAX_BYTES >> 20} MiB, which no report is")
    return parse(content, str(path))


def parse(content: bytes, path: str) -> LoadedReport:
    """Parses a file's content. Raises UsageError if it is no report, has a later schema, or holds wrong types or
    implausible numbers."""
    try:
        data = json.loads(content)  # msgspec's decoder would reject a path that is not valid Unicode
        schema = msgspec.convert(data, ReportHead).schema
        if schema in (1, SCHEMA):
            report = msgspec.convert(_of_schema_1(data) if schema == 1 else data, LoadedReport)
            if not all(0 <= share <= MAX_NUMBER for share in report.causes.values()):
                raise ValueError("the share of a finding is not plausible")
            for loader in report.loaders:
                figures(loader)
            report.path = path
            return report
    except (ValueError, OverflowError, RecursionError) as e:  # msgspec's errors are ValueErrors
        raise UsageError(f"{path} is not a report of stoker run: {_shown(str(e))}") from e
    raise UsageError(
        f"{path} has schema {schema}, this stoker compares schema 1 to {SCHEMA}: make both reports with one "
        "version of stoker"
    )


def _of_schema_1(data: JsonObject) -> JsonObject:
    """Converts a report of schema 1, which had no wall clock, and null for what was not seen."""
    loaders = [{k: v for k, v in x.items() if v is not None} if isinstance(x, dict) else x for x in data["loaders"]]
    return {"wall_s": 0.0, **data, "loaders": loaders}


def figures(loader: LoaderReport) -> dict[str, float]:
    """Returns the known ones of ``FIGURES``. Raises ValueError if one is not plausible."""
    found = {name: x for name, figure in FIGURES.items() if (x := figure.of(loader)) is not None}
    for name, x in found.items():
        if not 0 <= x <= MAX_NUMBER:
            raise ValueError(f"{name} of a loader is not between 0 and {MAX_NUMBER:g}")
    return found


class Pair(NamedTuple):
    """One loader in both reports."""

    a: LoaderReport
    b: LoaderReport

    @property
    def ratio(self) -> dict[str, float | None]:
        """For each figure known in both, b over a; None if a is about 0."""
        a, b = figures(self.a), figures(self.b)
        return {name: _over(b[name], a[name]) for name in FIGURES if name in a and name in b}

    @property
    def loss(self) -> float | None:
        """How much slower b is, as a share; negative if b is faster, None if unknown. It is the drop in samples/s or,
        without counted samples, the increase of the loop's time per batch."""
        ratio = self.ratio
        for name, sign in (("samples_per_s", -1.0), ("loop_s", 1.0)):
            found = ratio.get(name)
            if found is not None:
                return sign * (found - 1.0)
        return None

    @property
    def changed(self) -> dict[str, tuple[object, object]]:
        """Settings that differ, with their values in a and in b."""
        a, b = ({k: _plain(v) for k, v in msgspec.to_builtins(loader.settings).items()} for loader in self)
        return {name: (a[name], b[name]) for name in a if a[name] != b[name]}


@dataclass
class Comparison:
    """The result of ``compare``. ``fail_above`` is the share of samples/s that b may lose; None sets no limit."""

    a: LoadedReport
    b: LoadedReport
    pairs: list[Pair]
    only_a: list[str]
    only_b: list[str]
    fail_above: float | None

    def __post_init__(self) -> None:
        a, b = self.a.causes, self.b.causes
        self.appeared = {cause: share for cause, share in b.items() if cause not in a}  # shares of the loop
        self.vanished = {cause: share for cause, share in a.items() if cause not in b}

    def losses(self, before: str = "A") -> list[str]:
        """Returns a sentence for each loader that got slower by more than ``fail_above``. They call the first report
        ``before``."""
        out = []
        for pair in self.pairs:
            if self.fail_above is not None and pair.loss is not None and pair.loss > self.fail_above + EXACT:
                what = "fewer samples/s" if pair.ratio.get("samples_per_s") is not None else "more time for a batch"
                allowed = f"--fail-above allows {self.fail_above * 100:g}%"
                out.append(f"{_name(pair.b)}: {pair.loss:.1%} {what} than in {before}; {allowed}")
        return out

    @property
    def notes(self) -> list[str]:
        """Sentences about what makes the comparison less fair."""
        out = [f"{side} {caveat}" for side, report in (("A", self.a), ("B", self.b)) for caveat in _caveats(report)]
        machines = _machines(self.a.machine, self.b.machine)
        out += [f"not the same machine: {machines}"] * bool(machines)
        commands = [_shown(" ".join(report.command)) or "none" for report in (self.a, self.b)]
        out += [f"not the same command: {commands[0]} in A, {commands[1]} in B"] * (commands[0] != commands[1])
        moved = [(_name(p.a), _name(p.b)) for p in self.pairs if _name(p.a) != _name(p.b)]
        out += [f"{new} of B is compared with {old} of A" for old, new in moved]
        out += [f"{name} is in A only" for name in self.only_a]
        return out + [f"{name} is in B only" for name in self.only_b]

    def as_dict(self) -> JsonObject:
        """For JSON; ``docs/compare.md`` has the keys."""
        loaders = [
            {
                "name": pair.a.name,
                "name_b": pair.b.name,
                "a": figures(pair.a),
                "b": figures(pair.b),
                "ratio": pair.ratio,
                "loss": pair.loss,
                "settings": pair.changed,
            }
            for pair in self.pairs
        ]
        names = ("only_a", "only_b", "appeared", "vanished", "notes", "fail_above")
        found = {"loaders": loaders, **{name: getattr(self, name) for name in names}, "failed": self.losses()}
        return {"schema": 2, "kind": "compare", "a": self.a.path, "b": self.b.path, **found}

    def text(self, columns: int = 80, colour: bool = False) -> str:

        def wrapped(text: str) -> str:
            return textwrap.fill(printable(text), columns, subsequent_indent="  ", break_on_hyphens=False)

        out = [wrapped(f"A: {self.a.path}"), wrapped(f"B: {self.b.path}")]
        for pair in self.pairs:
            head, _, rows = table([_name(pair.b), "A", "B", "B/A"], _rows(pair), columns).partition("\n")
            out += ["", style(head, "bold", colour), rows]
            changed = ", ".join(f"{name} {_shown(str(a))} -> {_shown(str(b))}" for name, (a, b) in pair.changed.items())
            out += [wrapped(f"settings: {changed}")] * bool(changed)
        old, new = self.a.verdict, self.b.verdict
        out += ["", wrapped("verdict: " + (f"{new}, in both" if old == new else f"{old} -> {new}"))]
        out += [wrapped(f"new: {_shown(c)}, which costs {share:.0%} of the loop") for c, share in self.appeared.items()]
        out += [wrapped(f"gone: {_shown(c)}, which cost {share:.0%} of the loop") for c, share in self.vanished.items()]
        return "\n".join(out + [style(wrapped(f"note: {note}"), "yellow", colour) for note in self.notes])


def compare(a: LoadedReport, b: LoadedReport, fail_above: float | None = None) -> Comparison:
    """Compares two reports.

    A loader's name is the line that created it, which moves when the script is edited. So loaders are matched by full
    name, then by short name, then by file, if only one loader on each side has it.

    Raises:
        UsageError: the reports have no loader in common.
    """
    pairs: list[Pair] = []
    rest_a, rest_b = list(a.loaders), list(b.loaders)
    for part in (str, short, lambda name: short(name).rpartition(":")[0] or short(name)):
        alone_a, alone_b = _alone(rest_a, part), _alone(rest_b, part)
        found = [Pair(alone_a[name], alone_b[name]) for name in alone_a if name in alone_b]
        rest_a = [loader for loader in rest_a if all(loader is not pair.a for pair in found)]
        rest_b = [loader for loader in rest_b if all(loader is not pair.b for pair in found)]
        pairs += found
    if not pairs:
        named = [", ".join(map(_name, report.loaders[:FEW])) or "none at all" for report in (a, b)]
        raise UsageError(f"no loader is in both: {a.path} has {named[0]}, {b.path} has {named[1]}")
    place = {id(loader): i for i, loader in enumerate(a.loaders)}
    pairs.sort(key=lambda pair: place[id(pair.a)])
    return Comparison(a, b, pairs, [_name(x) for x in rest_a], [_name(x) for x in rest_b], fail_above)


def _alone(loaders: Sequence[LoaderReport], part: Callable[[str], str]) -> dict[str, LoaderReport]:
    """Returns the loaders whose ``part`` of the name is unique among them, keyed by that part."""
    names = [part(loader.name) for loader in loaders]
    return {name: loader for name, loader in zip(names, loaders, strict=True) if names.count(name) == 1}


def _name(loader: LoaderReport) -> str:
    """Returns ``file:line`` without folders, shortened to fit the table."""
    name = printable(short(loader.name))
    return name if len(name) <= NAME else "..." + name[3 - NAME :]


def _rows(pair: Pair) -> list[list[str]]:
    """Returns the table's rows: one for each figure known in at least one report."""
    out, ratio, both = [], pair.ratio, (figures(pair.a), figures(pair.b))
    for name, (label, text, _) in FIGURES.items():
        if any(name in values for values in both):
            cells = (text(values[name]) if name in values else "-" for values in both)
            x = ratio.get(name)
            out.append([label, *cells, "" if x is None else f"{x:.2f}x" if x < 1e4 else f"{x:.1e}x"])
    return out


def _caveats(report: LoadedReport) -> list[str]:
    out = ["is partial: a process was killed before it reported"] * report.partial
    if report.exit_code:
        out.append(f"is of a command that failed, with exit code {_shown(str(report.exit_code))}")
    few = [loader for loader in report.loaders if loader.batches < FEW]
    return out + [f"has {loader.batches:,} batches of {_name(loader)}: too few to tell" for loader in few]


def _machines(a: ReportMachine, b: ReportMachine) -> str:
    """Returns how the machines differ; "" if they do not."""
    memory = sorted((a.memory or 0, b.memory or 0))
    gpus = [", ".join(gpu.name for gpu in machine.gpus) or "none" for machine in (a, b)]
    pairs = {"cores": (a.cores, b.cores), "gpus": gpus, "python": (a.python, b.python)}
    differs = [f"{name} {old} and {new}" for name, (old, new) in pairs.items() if old != new]
    if memory[1] - memory[0] > MEMORY * memory[1]:
        differs.append(f"memory {human_bytes(a.memory or 0)} and {human_bytes(b.memory or 0)}")
    return _shown(", ".join(differs))


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _shown(text: str) -> str:
    return printable(text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "...")
