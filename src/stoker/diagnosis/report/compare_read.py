"""Reads a report for ``compare``: of ``stoker run``, ``stoker bench`` or ``stoker tune``, schema 1 or 2.

A file may hold anything: msgspec checks the types, and every figure that is compared has to be a plausible number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import Struct

from ...core.errors import UsageError
from .schema import SCHEMA, LoaderReport

MAX_BYTES = 64 << 20  # of a file; a report has some kilobytes
MAX_NUMBER = 1e15  # no clock, memory or count gets there, and sums of such numbers are still numbers
MAX_TEXT = 200  # characters of a text that is shown
SETTINGS = (
    "engine", "num_workers", "worker_method", "prefetch_factor", "batch_size", "pin_memory", "persistent_workers",
    "processes", "threads", "step_s", "device",
)  # fmt: skip
Settings = dict[str, object]


class _Loader(LoaderReport):
    # As it stands in the file: a setting that one report lacks is not compared.
    settings: Settings = msgspec.field(default_factory=dict)  # type: ignore[assignment]


class _Finding(Struct):
    cause: str
    share: float


class _Gpu(Struct):
    name: str


class _Machine(Struct):
    cores: int | None = None
    memory: int | None = None
    gpus: list[_Gpu] | None = None
    python: str | None = None
    platform: str | None = None


class _Report(Struct, kw_only=True):
    """What the reports of all three commands have."""

    schema: int
    command: list[str] = []
    machine: _Machine = msgspec.field(default_factory=_Machine)
    partial: bool = False
    exit_code: int = 0
    findings: list[_Finding] = []
    verdict: str = ""


class _Run(_Report, kw_only=True):
    loaders: list[_Loader]


class _BenchLoader(Struct):
    batches: int
    seconds: float
    wait_s: float
    first_batch_s: float
    samples_per_s: float | None = None
    mb_per_s: float | None = None
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None


class _Bench(_Report, kw_only=True):
    name: str
    loader: _BenchLoader
    with_copy: _BenchLoader | None = None
    settings: Settings = {}
    step_s: float | None = None
    device: str | None = None


class _Tune(_Report, kw_only=True):
    name: str
    rate: float
    best: Settings


class Measured(Struct, frozen=True):
    """One loader of a report.

    Attributes:
        key: by which it is matched.
        name: what it is called.
        batches: how many there were; None where the report does not say.
        figures: seconds of one batch (``startup_s``: to the first), bytes, samples and MB per second; without those
            that the report does not have.
        settings: by torch's names.
    """

    key: str
    name: str
    batches: int | None
    figures: dict[str, float]
    settings: Settings


class Report(Struct, frozen=True):
    """What is compared of a report.

    Attributes:
        path: where it was.
        kind: the command that wrote it: "run", "bench" or "tune".
        verdict: of the doctor, "" where there is none.
        findings: cause, and its share of the loop.
        command: what was run, as one text.
        machine: what is known of it.
        partial: a process was killed before it reported.
        exit_code: the command's.
        loaders: what was measured.
    """

    path: str
    kind: str
    verdict: str
    findings: dict[str, float]
    command: str
    machine: Settings
    partial: bool
    exit_code: int
    loaders: list[Measured]


def load(path: Path) -> Report:
    """Reads a file.

    Raises:
        UsageError: it cannot be read, or is no report that this version knows.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror or e}") from e
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path} is larger than {MAX_BYTES >> 20} MiB, which no report is")
    try:
        data = json.loads(content, parse_constant=_not_standard)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path} is not JSON: {_printable(str(e))}") from e
    return parse(data, str(path))


def parse(data: object, path: str) -> Report:
    """The report in what JSON gave.

    Args:
        data: anything.
        path: what errors call it.

    Raises:
        UsageError: it is no report, of another schema, or something in it has the wrong type.

    Example:
        >>> parse({"schema": 1, "loaders": [], "verdict": "unknown"}, "report.json").kind
        'run'
    """
    path = _printable(path)
    kind = _kind(data)
    if not kind:
        raise UsageError(f"{path} is not a report of stoker run, stoker bench or stoker tune")
    try:
        report = msgspec.convert(data, {"run": _Run, "bench": _Bench, "tune": _Tune}[kind])
        if not 1 <= report.schema <= SCHEMA:  # what is compared has been the same in all of them
            raise ValueError(f"schema {report.schema}; this stoker compares schema 1 to {SCHEMA}")
        return _report(path, kind, report)
    except (ValueError, OverflowError, RecursionError) as e:  # msgspec's errors are ValueErrors
        raise UsageError(f"{path} is not a report that can be compared: {_printable(str(e))}") from e


def _kind(data: object) -> str:
    if not isinstance(data, dict) or "schema" not in data:
        return ""
    if "kind" in data:
        return "bench" if data["kind"] == "bench" else ""
    return "run" if "loaders" in data else "tune" if "best" in data and "curve" in data else ""


def _report(path: str, kind: str, report: _Report) -> Report:
    loaders = list(_measured(report))
    if len({loader.key for loader in loaders}) < len(loaders):
        raise ValueError("it names a loader twice")
    if not -256 < report.exit_code < 256:
        raise ValueError(f"exit_code is {report.exit_code}")
    machine = {"cores": report.machine.cores, "memory": report.machine.memory}
    about = {"python": report.machine.python, "platform": report.machine.platform}
    if report.machine.gpus is not None:
        about["gpus"] = ", ".join(gpu.name for gpu in report.machine.gpus) or "none"
    findings = _numbers({_printable(f.cause): f.share for f in sorted(report.findings, key=lambda f: f.share)})
    return Report(
        path=path,
        kind=kind,
        verdict=_printable(report.verdict),
        findings=findings,
        command=" ".join(map(_printable, report.command)),
        machine={**_numbers(machine), **{name: _printable(text) for name, text in about.items() if text is not None}},
        partial=report.partial,
        exit_code=report.exit_code,
        loaders=loaders,
    )


def _measured(report: _Report) -> Iterator[Measured]:
    if isinstance(report, _Run):
        for loader in report.loaders:
            name = _printable(loader.name)
            yield Measured(name, name, loader.batches, _run_figures(loader), _plain(loader.settings))
    elif isinstance(report, _Bench):
        settings = _plain({**report.settings, "step_s": report.step_s, "device": report.device})
        for key, bench, note in (("loader", report.loader, ""), ("with_copy", report.with_copy, " with the copy")):
            if bench is not None:
                yield Measured(key, _printable(report.name) + note, bench.batches, _bench_figures(bench), settings)
    elif isinstance(report, _Tune):
        figures = _numbers({"samples_per_s": report.rate or None})
        yield Measured("tune", _printable(report.name), None, figures, _plain(report.best))


def _run_figures(loader: _Loader) -> dict[str, float]:
    for name in ("batches", "samples", "epochs", "wait_s", "step_s"):
        _check(name, getattr(loader, name))
    loop_s, stages = loader.busy_s, loader.stages
    tasks, batches, pss = stages.worker.tasks, loader.batches, loader.memory.worker_pss
    return _numbers(
        {
            "samples_per_s": loader.samples_per_s if loader.samples else None,
            "wait_share": loader.wait_s / loop_s if loop_s else None,
            "loop_s": _each(loop_s, batches),
            "wait_s": _each(loader.wait_s, batches),
            "step_s": _each(loader.step_s, batches),
            "fetch_s": _each(stages.fetch.self_s, tasks),
            "collate_s": _each(stages.collate.self_s, tasks),
            "transport_s": _each(stages.transport.self_s, tasks),
            "worker_cpu_s": _each(stages.worker.cpu_s, tasks),
            "consumer_cpu_s": _each(stages.consumer.cpu_s, batches),
            "startup_s": _each(stages.startup.wait_s, loader.epochs),
            "workers_bytes": sum(pss) if pss else None,
            "batch_bytes": loader.memory.batch_bytes or None,  # 0: not measured
        }
    )


def _bench_figures(loader: _BenchLoader) -> dict[str, float]:
    _numbers({"batches": loader.batches})
    return _numbers(
        {
            "samples_per_s": loader.samples_per_s or None,
            "mb_per_s": loader.mb_per_s or None,
            "wait_share": loader.wait_s / loader.seconds if loader.batches and loader.seconds else None,
            "loop_s": _each(loader.seconds, loader.batches),
            "wait_s": _each(loader.wait_s, loader.batches),
            "wait_p50_s": loader.p50_s,
            "wait_p95_s": loader.p95_s,
            "wait_p99_s": loader.p99_s,
            "startup_s": loader.first_batch_s,
        }
    )


def _each(total: float, count: int) -> float | None:
    return total / count if count >= 1 else None


def _numbers(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Those that are known."""
    found = {name: x for name, x in figures.items() if x is not None}
    for name, x in found.items():
        _check(name, x, 2 * MAX_NUMBER)  # waiting and steps were added
    return found


def _check(name: str, x: float, most: float = MAX_NUMBER) -> None:
    if not 0 <= x <= most:
        raise ValueError(f"{name} is not between 0 and {most:g}")


def _plain(settings: Settings) -> Settings:
    """The settings that are compared: texts, numbers, true, false, null."""
    out: Settings = {}
    for name in SETTINGS:
        value = settings.get(name)
        if isinstance(value, str):
            out[name] = _printable(value)
        elif value is None or (isinstance(value, (bool, int, float)) and abs(value) <= MAX_NUMBER):
            out[name] = value
        else:
            raise ValueError(f"settings.{name} is not a text, a plausible number, true, false or null")
    return {name: value for name, value in out.items() if name in settings}


def _not_standard(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _printable(text: str) -> str:
    """Text for a terminal: without escape sequences and halves of surrogate pairs, and not too long."""
    text = "".join(c if c.isprintable() else "?" for c in text[: MAX_TEXT + 1])
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
