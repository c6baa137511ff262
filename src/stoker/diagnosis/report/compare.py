"""Two reports side by side, the second as ratios of the first. It reads and writes nothing: ``compare_read`` reads.

What ``stoker bench`` and ``stoker tune`` write is compared as a report with one loader, or two.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

import msgspec

from ...core.errors import UsageError
from ...core.terminal import colour_wanted, human_bytes, human_seconds, style, table, width
from ...core.types import JsonObject
from .compare_read import Measured, Report, Settings

SCHEMA = 1
FEW = 5  # batches; with fewer a ratio is noise
NAME = 40  # characters of a loader's name that a table of 80 columns has room for
EXACT = 1e-9  # of a share: 95 of 100 are not more than 5 % fewer
MEMORY = 0.05  # machines whose memory differs by less are the same


def _rate(x: float) -> str:
    return f"{x:,.0f}" if 1000 <= x < 1e12 else f"{x:.3g}"


_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("samples_per_s", "samples/s", _rate),
    ("mb_per_s", "MB/s", _rate),
    ("wait_share", "waiting, of the loop", "{:.0%}".format),
    ("loop_s", "loop, a batch", human_seconds),
    ("wait_s", "  waiting", human_seconds),
    ("step_s", "  step", human_seconds),
    ("wait_p50_s", "  wait p50", human_seconds),
    ("wait_p95_s", "  wait p95", human_seconds),
    ("wait_p99_s", "  wait p99", human_seconds),
    ("fetch_s", "worker, a batch: fetch", human_seconds),
    ("collate_s", "  collate", human_seconds),
    ("transport_s", "  transport", human_seconds),
    ("worker_cpu_s", "  CPU", human_seconds),
    ("consumer_cpu_s", "CPU of a step", human_seconds),
    ("startup_s", "first batch", human_seconds),
    ("workers_bytes", "memory of workers", human_bytes),
    ("batch_bytes", "largest batch", human_bytes),
)


@dataclass(frozen=True)
class Pair:
    """One loader in both reports."""

    a: Measured
    b: Measured

    @property
    def ratio(self) -> dict[str, float | None]:
        """By figure, b over a; None where that cannot be said."""
        names = [name for name, _, _ in _FIGURES if name in self.a.figures and name in self.b.figures]
        return {name: _over(self.b.figures[name], self.a.figures[name]) for name in names}

    @property
    def loss(self) -> float | None:
        """How much slower b is: the part of a's samples/s that it lacks, or, where no samples were counted, by which
        part its loop takes longer a batch. Negative where b is faster; None where neither is known."""
        for name, sign in (("samples_per_s", -1.0), ("loop_s", 1.0)):
            ratio = _over(self.b.figures.get(name), self.a.figures.get(name))
            if ratio is not None:
                return sign * (ratio - 1.0)
        return None

    @property
    def changed(self) -> dict[str, tuple[object, object]]:
        """Settings that differ: what they are in a and in b."""
        a, b = self.a.settings, self.b.settings
        return {name: (a[name], b[name]) for name in a if name in b and a[name] != b[name]}

    def as_dict(self) -> JsonObject:
        """For JSON."""
        return {
            "name": self.a.name,
            "name_b": self.b.name,
            "a": self.a.figures,
            "b": self.b.figures,
            "ratio": self.ratio,
            "loss": self.loss,
            "settings": {name: list(values) for name, values in self.changed.items()},
        }


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found.

    Attributes:
        a, b: the reports.
        pairs: loaders of both, in a's order.
        only_a, only_b: names of the others.
        fail_above: the share of samples/s that b may lack; None: as much as it likes.
    """

    a: Report
    b: Report
    pairs: tuple[Pair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    fail_above: float | None

    @property
    def appeared(self) -> dict[str, float]:
        """Findings of b that a has not, with the share of the loop they cost."""
        return {cause: share for cause, share in self.b.findings.items() if cause not in self.a.findings}

    @property
    def vanished(self) -> dict[str, float]:
        """Findings of a that b has not."""
        return {cause: share for cause, share in self.a.findings.items() if cause not in self.b.findings}

    @property
    def judged(self) -> bool:
        """Whether there is a loader whose speed is known in both."""
        return any(pair.loss is not None for pair in self.pairs)

    @property
    def failed(self) -> list[str]:
        """A sentence for each loader that got slower by more than ``fail_above``."""
        out = []
        for pair in self.pairs:
            if self.fail_above is not None and pair.loss is not None and pair.loss > self.fail_above + EXACT:
                what = "fewer samples/s" if pair.ratio.get("samples_per_s") is not None else "more time for a batch"
                allowed = f"--fail-above allows {self.fail_above * 100:g}%"
                out.append(f"{short(pair.b.name)}: {pair.loss:.1%} {what} than in A; {allowed}")
        return out

    @property
    def notes(self) -> list[str]:
        """What stands between the two reports and a fair comparison, in sentences."""
        out = [f"{letter} {words}" for letter, report in (("A", self.a), ("B", self.b)) for words in _caveats(report)]
        differs = _machines(self.a.machine, self.b.machine)
        if differs:
            out.append("not the same machine: " + ", ".join(f"{name} {a} and {b}" for name, a, b in differs))
        if self.a.command != self.b.command:
            out.append(f"not the same command: {self.a.command or 'none'} in A, {self.b.command or 'none'} in B")
        out += [
            f"{short(p.b.name)} of B is compared with {short(p.a.name)} of A"
            for p in self.pairs
            if short(p.a.name) != short(p.b.name)
        ]
        out += [f"{short(name)} is in A only" for name in self.only_a]
        out += [f"{short(name)} is in B only" for name in self.only_b]
        return out

    def as_dict(self) -> JsonObject:
        """For JSON; ``docs/compare.md`` has the keys."""
        return {
            "schema": SCHEMA,
            "kind": "compare",
            "a": _head(self.a),
            "b": _head(self.b),
            "loaders": [pair.as_dict() for pair in self.pairs],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "appeared": self.appeared,
            "vanished": self.vanished,
            "notes": self.notes,
            "fail_above": self.fail_above,
            "failed": self.failed,
        }

    def __str__(self) -> str:
        return self.text(80, colour=False)

    def show(self, stream: TextIO) -> None:
        """Prints it, as wide and as colourful as ``stream`` is."""
        print(self.text(width(stream), colour_wanted(stream)), file=stream)

    def text(self, columns: int, colour: bool) -> str:
        """For a terminal."""
        out = [_wrapped(f"{letter}: {report.path}", columns) for letter, report in (("A", self.a), ("B", self.b))]
        for pair in self.pairs:
            head, _, rows = table([short(pair.b.name), "A", "B", "B/A"], _rows(pair), columns).partition("\n")
            out += ["", style(head, "bold", colour), rows]
            if pair.changed:
                words = ", ".join(f"{name} {a} -> {b}" for name, (a, b) in pair.changed.items())
                out.append(_wrapped(f"settings: {words}", columns))
        out.append("")
        if self.a.verdict and self.b.verdict:
            same = self.a.verdict == self.b.verdict
            out.append(
                "verdict: " + (f"{self.b.verdict}, in both" if same else f"{self.a.verdict} -> {self.b.verdict}")
            )
        for word, found in (("new", self.appeared), ("gone", self.vanished)):
            what = "costs" if word == "new" else "cost"
            out += [_wrapped(f"{word}: {c}, which {what} {s:.0%} of the loop", columns) for c, s in found.items()]
        out += [style(_wrapped(f"note: {words}", columns), "yellow", colour) for words in self.notes]
        return "\n".join(out).rstrip("\n")


def compare(a: Report, b: Report, fail_above: float | None = None) -> Comparison:
    """Compares two reports of the same command.

    A loader's name is the line that made it, which moves when the script is edited. So loaders are matched by name,
    then by the last part of it, then by file, where that leaves one on each side.

    Args:
        a: what to compare with.
        b: what is judged.
        fail_above: the share of samples/s that a loader of ``b`` may lack, 0 to 1; None: whatever it lacks.

    Raises:
        UsageError: they come from different commands, or have no loader in common.

    Example:
        >>> from .compare_read import parse
        >>> entry = {"name": "t.py:3", "batches": 10, "samples": 40, "epochs": 1, "wait_s": 1.0, "step_s": 1.0}
        >>> before = parse({"schema": 1, "loaders": [{**entry, "samples_per_s": 20.0}]}, "a.json")
        >>> after = parse({"schema": 1, "loaders": [{**entry, "samples_per_s": 30.0}]}, "b.json")
        >>> compare(before, after).pairs[0].ratio["samples_per_s"]
        1.5
    """
    if a.kind != b.kind:
        raise UsageError(
            f"{a.path} is of stoker {a.kind}, {b.path} of stoker {b.kind}: that is not the same measurement"
        )
    pairs: list[Pair] = []
    rest_a: Sequence[Measured] = a.loaders
    rest_b: Sequence[Measured] = b.loaders
    for part in (str, _base, _file):
        alone_a, alone_b = _alone(rest_a, part), _alone(rest_b, part)
        found = [Pair(alone_a[name], alone_b[name]) for name in alone_a if name in alone_b]
        rest_a = _without(rest_a, {pair.a.key for pair in found})
        rest_b = _without(rest_b, {pair.b.key for pair in found})
        pairs += found
    if not pairs:
        raise UsageError(f"no loader is in both: {a.path} has {_named(a.loaders)}, {b.path} has {_named(b.loaders)}")
    place = {s.key: i for i, s in enumerate(a.loaders)}
    pairs.sort(key=lambda pair: place[pair.a.key])
    only_a, only_b = (tuple(s.name for s in rest) for rest in (rest_a, rest_b))
    return Comparison(a, b, tuple(pairs), only_a, only_b, fail_above)


def short(name: str) -> str:
    """``file:line`` without the folders, and no longer than a table has room for.

    Example:
        >>> short("/home/me/train.py:12")
        'train.py:12'
    """
    name = _base(name)
    return name if len(name) <= NAME else "..." + name[3 - NAME :]


def _base(name: str) -> str:
    return name.replace("\\", "/").rsplit("/", 1)[-1]


def _file(name: str) -> str:
    return _base(name).rpartition(":")[0] or _base(name)


def _alone(loaders: Sequence[Measured], part: Callable[[str], str]) -> dict[str, Measured]:
    """Those that no other one shares this part of the name with, by it."""
    groups: dict[str, list[Measured]] = {}
    for s in loaders:
        groups.setdefault(part(s.key), []).append(s)
    return {name: found[0] for name, found in groups.items() if len(found) == 1}


def _without(loaders: Sequence[Measured], keys: set[str]) -> tuple[Measured, ...]:
    return tuple(s for s in loaders if s.key not in keys)


def _named(loaders: Sequence[Measured]) -> str:
    names = [short(s.name) for s in loaders[:FEW]] + ["..."] * (len(loaders) > FEW)
    return ", ".join(names) or "none at all"


def _over(b: float | None, a: float | None) -> float | None:
    return b / a if a is not None and b is not None and a > 1e-12 else None  # so little is no measurement


def _rows(pair: Pair) -> list[list[str]]:
    out = []
    for name, label, words in _FIGURES:
        a, b = pair.a.figures.get(name), pair.b.figures.get(name)
        if a is None and b is None:
            continue
        ratio = _over(b, a)
        shown = f"{ratio:.2f}x" if ratio is not None and ratio < 1e4 else "" if ratio is None else f"{ratio:.1e}x"
        out.append([label, *("-" if x is None else words(x) for x in (a, b)), shown])
    return out


def _wrapped(text: str, columns: int) -> str:
    return textwrap.fill(text, columns, subsequent_indent="  ", break_on_hyphens=False)


def _head(report: Report) -> JsonObject:
    out: JsonObject = msgspec.to_builtins(report)
    del out["loaders"]
    return out


def _caveats(report: Report) -> list[str]:
    out = []
    if report.partial:
        out.append("is partial: a process was killed before it reported")
    if report.exit_code:
        out.append(f"is of a command that failed, with exit code {report.exit_code}")
    out += [
        f"has {s.batches:,} batches of {short(s.name)}: too few to tell"
        for s in report.loaders
        if s.batches is not None and s.batches < FEW
    ]
    return out


def _machines(a: Settings, b: Settings) -> list[tuple[str, str, str]]:
    """What differs between the machines: its name, and its value on both."""
    out = []
    for name in a:
        old, new = a[name], b.get(name, a[name])
        if name == "memory" and isinstance(old, float | int) and isinstance(new, float | int):
            if abs(old - new) > MEMORY * max(old, new):
                out.append(("memory", human_bytes(old), human_bytes(new)))
        elif old != new:
            out.append((name, str(old), str(new)))
    return out
