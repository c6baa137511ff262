"""Reads a report for ``compare``. A file may hold anything: what is used of it is checked, and nothing else is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...core.errors import UsageError
from .schema import SCHEMA

MOST_BYTES = 64 << 20  # of a file; a report has some kilobytes
MOST = 1e15  # of a number: no clock, memory or count here gets there, and sums of it are still numbers
WORDS = 200  # of a text that is shown
MACHINE = ("cores", "memory", "gpus", "python", "platform")
SETTINGS = (
    "engine", "num_workers", "worker_method", "prefetch_factor", "batch_size", "pin_memory", "persistent_workers",
    "processes", "threads",
)  # fmt: skip


@dataclass(frozen=True)
class Seen:
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
    settings: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """What is compared of a report.

    Attributes:
        path: where it was.
        kind: the command that wrote it: "run", "bench" or "tune".
        loaders: what was measured.
        verdict: of the doctor, "" where there is none.
        findings: cause, and its share of the loop.
        command: what was run, as one text.
        machine: what is known of it.
        partial: a process ended without a last word.
        exit_code: the command's.
    """

    path: str
    kind: str
    loaders: tuple[Seen, ...]
    verdict: str
    findings: dict[str, float]
    command: str
    machine: dict[str, Any]
    partial: bool
    exit_code: int


def load(path: Path) -> Report:
    """Reads a file.

    Raises:
        UsageError: it cannot be read, or is no report that this version knows.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror or e}") from e
    if len(content) > MOST_BYTES:
        raise UsageError(f"{path} is larger than {MOST_BYTES >> 20} MiB: no report is")
    try:
        data = json.loads(content, parse_constant=_no_number)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path} is no JSON: {_clean(str(e))}") from e
    return parse(data, str(path))


def parse(data: Any, path: str) -> Report:
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
    root = _Part(data, _clean(path))
    kind = _kind(data)
    if not kind:
        raise UsageError(f"{root.file} is no report of stoker run, stoker bench or stoker tune")
    if type(data.get("schema")) is not int:
        root.wrong("schema", "no version number")
    if not 1 <= data["schema"] <= SCHEMA:  # what is compared has been the same in all of them
        raise UsageError(f"{root.file} has schema {_shown(data['schema'])}; this stoker compares schema 1 to {SCHEMA}")
    loaders = {"run": _run, "bench": _bench, "tune": _tune}[kind](root)
    if len({s.key for s in loaders}) < len(loaders):
        raise UsageError(f"{root.file} names a loader twice")
    return Report(
        path=root.file,
        kind=kind,
        loaders=tuple(loaders),
        verdict=root.text("verdict") if kind == "run" and "verdict" in data else "",
        findings=_findings(root),
        command=" ".join(root.texts("command")),
        machine=_machine(root.part("machine")),
        partial=root.flag("partial"),
        exit_code=root.exit_code(),
    )


class _Part:
    """An object of the JSON, and where in the file it is."""

    def __init__(self, data: Any, file: str, where: str = "") -> None:
        self.data, self.file, self.where = data, file, where

    def wrong(self, key: str, what: str) -> NoReturn:
        raise UsageError(f"{self.file}: {self.where}{key} is {_shown(self.data.get(key))}: {what}")

    def part(self, key: str) -> _Part:
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            self.wrong(key, "no object")
        return _Part(value or {}, self.file, f"{self.where}{key}.")

    def parts(self, key: str) -> list[_Part]:
        out = []
        for i, value in enumerate(self.listed(key)):
            if not isinstance(value, dict):
                self.wrong(key, f"its item {i} is no object")
            out.append(_Part(value, self.file, f"{self.where}{key}[{i}]."))
        return out

    def listed(self, key: str) -> list[Any]:
        value = self.data.get(key)
        if value is not None and not isinstance(value, list):
            self.wrong(key, "no list")
        return value or []

    def number(self, key: str) -> float:
        value = self.data.get(key)
        if not _is_number(value):
            self.wrong(key, f"no number from 0 to {MOST:g}")
        return float(value)

    def some(self, key: str) -> float | None:
        """A number that need not be there."""
        return None if self.data.get(key) is None else self.number(key)

    def total(self, key: str) -> float | None:
        """The sum of a list of numbers; None where there are none."""
        values = self.listed(key)
        if not all(map(_is_number, values)):
            self.wrong(key, "no list of numbers")
        return float(sum(values)) if values else None

    def text(self, key: str) -> str:
        value = self.data.get(key)
        if not isinstance(value, str):
            self.wrong(key, "no text")
        return _clean(value)

    def texts(self, key: str) -> list[str]:
        values = self.listed(key)
        if not all(isinstance(v, str) for v in values):
            self.wrong(key, "no list of texts")
        return [_clean(v) for v in values]

    def flag(self, key: str) -> bool:
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool):
            self.wrong(key, "neither true nor false")
        return bool(value)

    def exit_code(self) -> int:
        value = self.data.get("exit_code") or 0
        if type(value) is not int or not -256 < value < 256:
            self.wrong("exit_code", "no exit code")
        return int(value)

    def scalars(self, keys: Sequence[str]) -> dict[str, Any]:
        out = {}
        for key in keys:
            value = self.data.get(key)
            if isinstance(value, str):
                out[key] = _clean(value)
            elif value is None or isinstance(value, bool) or _is_number(value):
                out[key] = value
            else:
                self.wrong(key, "no plain value")
        return {key: value for key, value in out.items() if key in self.data}


def _kind(data: Any) -> str:
    if not isinstance(data, dict) or "schema" not in data:
        return ""
    if "kind" in data:
        return "bench" if data["kind"] == "bench" else ""
    return "run" if "loaders" in data else "tune" if "best" in data and "curve" in data else ""


def _run(root: _Part) -> list[Seen]:
    if not isinstance(root.data["loaders"], list):
        root.wrong("loaders", "no list")
    return [_loader(part) for part in root.parts("loaders")]


def _loader(e: _Part) -> Seen:
    batches, epochs, wait, step = (e.number(key) for key in ("batches", "epochs", "wait_s", "step_s"))
    stages, memory = e.part("stages"), e.part("memory")
    worker = stages.part("worker")
    tasks = worker.some("tasks") or 0.0
    samples = e.number("samples")
    figures = {
        "samples_per_s": e.number("samples_per_s") if samples else None,
        "wait_share": wait / (wait + step) if wait + step else None,
        "loop_s": _each(wait + step, batches),
        "wait_s": _each(wait, batches),
        "step_s": _each(step, batches),
        **{f"{name}_s": _each(stages.part(name).some("self_s"), tasks) for name in ("fetch", "collate", "transport")},
        "worker_cpu_s": _each(worker.some("cpu_s"), tasks),
        "consumer_cpu_s": _each(stages.part("consumer").some("cpu_s"), batches),
        "startup_s": _each(stages.part("startup").some("wait_s"), epochs),
        "workers_bytes": memory.total("worker_pss"),
        "batch_bytes": memory.some("batch_bytes") or None,  # 0: nobody looked
    }
    name = e.text("name")
    return Seen(name, name, int(batches), _known(figures), e.part("settings").scalars(SETTINGS))


def _bench(root: _Part) -> list[Seen]:
    name = root.text("name")
    settings = {**root.part("settings").scalars(SETTINGS), **root.scalars(("step_s", "device"))}
    out = []
    for key, words in (("loader", ""), ("with_copy", " with the copy")):
        if key == "with_copy" and root.data.get(key) is None:
            continue
        e = root.part(key)
        batches, seconds, wait = (e.number(k) for k in ("batches", "seconds", "wait_s"))
        figures = {
            "samples_per_s": e.some("samples_per_s") or None,
            "mb_per_s": e.some("mb_per_s") or None,
            "wait_share": wait / seconds if batches and seconds else None,
            "loop_s": _each(seconds, batches),
            "wait_s": _each(wait, batches),
            **{f"wait_{p}_s": e.some(f"{p}_s") for p in ("p50", "p95", "p99")},
            "startup_s": e.number("first_batch_s"),
        }
        out.append(Seen(key, name + words, int(batches), _known(figures), settings))
    return out


def _tune(root: _Part) -> list[Seen]:
    figures = {"samples_per_s": root.number("rate") or None}
    return [Seen("tune", root.text("name"), None, _known(figures), root.part("best").scalars(SETTINGS))]


def _findings(root: _Part) -> dict[str, float]:
    out: dict[str, float] = {}
    for f in root.parts("findings"):
        out[f.text("cause")] = max(f.number("share"), out.get(f.text("cause"), 0.0))
    return out


def _machine(m: _Part) -> dict[str, Any]:
    out = m.scalars([name for name in MACHINE if name != "gpus"])
    for name in ("cores", "memory"):
        if name in out:
            m.number(name)
    for name in ("python", "platform"):
        if name in out:
            m.text(name)
    if "gpus" in m.data:
        out["gpus"] = ", ".join(gpu.text("name") for gpu in m.parts("gpus")) or "none"
    return out


def _each(total: float | None, n: float) -> float | None:
    return total / n if total is not None and n >= 1 else None


def _known(figures: dict[str, float | None]) -> dict[str, float]:
    return {name: x for name, x in figures.items() if x is not None}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MOST


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _clean(text: str) -> str:
    """Text for a terminal: a file may hold escape sequences, and halves of characters that nothing can print."""
    text = "".join(c if c.isprintable() else "?" for c in text[: WORDS + 1])
    return text if len(text) <= WORDS else text[:WORDS] + "..."


def _shown(value: Any) -> str:
    kind = {dict: "an object", list: "a list", type(None): "missing"}.get(type(value))
    return kind or _clean(repr(value)[:40])
