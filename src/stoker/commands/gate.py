"""``stoker run --fail-on``: conditions under which a run fails although its script succeeded, for CI."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core.errors import UsageError

if TYPE_CHECKING:
    from ..diagnosis.report.compare import LoadedReport
    from ..diagnosis.report.schema import RunReport

INPUT_BOUND, SLOWER = "input-bound", "slower-than="
ALLOWED = 0.1  # of samples/s; on a shared machine two runs of a script differ by more than compare's 5%


def condition(text: str) -> str:
    """Checks one value of ``--fail-on``."""
    if text != INPUT_BOUND and not (text.startswith(SLOWER) and text != SLOWER):
        raise click.BadParameter(f"{text!r} is not {INPUT_BOUND} or {SLOWER}REPORT")
    return text


class Gate:
    """The conditions of ``--fail-on``. Reports are read when it is created, before the script runs. Raises UsageError
    if one cannot be read, or if ``allowed`` is given without a report to compare with."""

    def __init__(self, conditions: Sequence[str] = (), allowed: float | None = None) -> None:
        self.asked = bool(conditions)
        self.input_bound = INPUT_BOUND in conditions
        self.allowed = ALLOWED if allowed is None else allowed
        paths = [Path(text.removeprefix(SLOWER)) for text in conditions if text.startswith(SLOWER)]
        self.reports: list[LoadedReport] = []
        if paths:
            from ..diagnosis.report.compare import load  # see run.REPORTING

            self.reports = [load(path) for path in paths]
        if allowed is not None and not self.reports:
            raise UsageError(f"--fail-above needs --fail-on {SLOWER}REPORT")

    def failed(self, report: RunReport) -> Iterator[str]:
        """Yields a sentence for each condition that holds, and for each that this run leaves undecided."""
        if self.input_bound and report.verdict in (INPUT_BOUND, "unknown"):
            known = report.verdict != "unknown"
            yield "the run is input-bound" if known else "too few batches to tell whether the run is input-bound"
        for before in self.reports:
            from ..diagnosis.report.compare import compare, parse

            now = parse(json.dumps(report.as_dict()).encode(), "this run")
            try:
                found = compare(before, now, self.allowed)
            except UsageError as e:
                yield f"{SLOWER}{before.path} cannot be judged: {e}"
                continue
            if all(pair.loss is None for pair in found.pairs):
                yield f"{SLOWER}{before.path} cannot be judged: no loader has samples/s or batches in both"
            yield from found.losses(before.path)
