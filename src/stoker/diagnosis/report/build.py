"""Builds the report of a run from what the watched processes sent and what the machine did during the run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from ...core import gpus, resources
from ...core.types import JsonObject
from ..doctor import ranks
from ..doctor.verdict import diagnose
from . import applied as applied_changes
from . import history, money, patch
from .headline import headline
from .merge import Snapshot, merged, snapshots
from .prices import Prices
from .schema import Applied, AppliedSettings, Around, LoaderReport, RunReport


def report_of(
    command: list[str],
    code: int,
    sent: Iterable[JsonObject],
    around: JsonObject,
    wall_s: float,
    apply: bool = False,
    prices: Prices | None = None,
    cut: bool = False,
) -> RunReport:
    """Returns the report (docs/report.md). ``cut``: stoker ended the command after some batches."""
    processes = snapshots(sent)
    meanwhile = msgspec.convert(around, Around)
    machine = _as_the_script_saw(resources.read(), meanwhile, processes)
    loaders = merged(processes)
    settings = {name: changed for process in processes for name, changed in process.applied.items()}
    for loader in loaders:
        if loader.name in settings:
            loader.cache = settings[loader.name].cache
        loader.settings.applied = apply
    cuda = any(process.cuda for process in processes)
    verdict, findings = diagnose(loaders, machine.cores, cuda, meanwhile, len(machine.gpus), machine.memory)
    partial = any(not process.final for process in processes)
    applied = _applied(command, wall_s, loaders, settings, not (code or partial or cut)) if apply else None
    if applied is not None:
        findings = applied_changes.findings(applied) + findings
    for finding in findings:
        finding.diff = patch.of(patch.changes([finding]))
    seen = {loader.name for loader in loaders if loader.batches}
    sent_bypassing = [loader for process in processes for loader in process.bypassing]
    bypassing = {each.name: msgspec.structs.replace(each, seen=each.name in seen) for each in sent_bypassing}
    report = RunReport(
        command=command,
        exit_code=code,
        wall_s=wall_s,
        loaders=loaders,
        verdict=verdict,
        findings=findings,
        machine=machine.as_dict(),
        around=meanwhile,
        applied=applied,
        ranks=ranks.compare(processes),
        bypassing=list(bypassing.values()),
        partial=partial,
        diff=patch.of(patch.changes(findings)),
    )
    report.money = money.of(report, prices) if prices is not None else None
    report.headline = headline(report)
    return report


def _applied(
    command: list[str], wall_s: float, loaders: list[LoaderReport], settings: dict[str, AppliedSettings], is_whole: bool
) -> Applied:
    """What ``--apply`` changed, and what that gained. ``is_whole``: the script ended, and with success."""
    before = history.load(command)
    compared = applied_changes.compare(wall_s, loaders, settings, before, history.digest(command), is_whole)
    gains = {row.name: row.samples_per_s.times_as_fast(rate=True) for row in compared.loaders}
    return Applied(settings, compared, before, {name: gain for name, gain in gains.items() if gain})


def _as_the_script_saw(machine: resources.Machine, around: Around, processes: Sequence[Snapshot]) -> resources.Machine:
    """Returns the machine with the resources that the script's processes were granted. The script may run in a smaller
    container, on fewer cores or on fewer GPUs than this process. Also narrows ``around``."""
    around.memory_available_min = _least(around.memory_available_min, *(p.memory_available_min for p in processes))
    around.shm_free_min = _least(around.shm_free_min, *(p.shm_free_min for p in processes))
    visible = {p.cuda_visible for p in processes if p.cuda_visible is not None}
    if visible and visible != {os.environ.get("CUDA_VISIBLE_DEVICES")}:
        every = [(g.index, g.uuid) for g in machine.gpus]
        chosen = {i for value in visible for i in gpus.visible_gpus(every, value)}
        machine = replace(machine, gpus=[gpu for i, gpu in enumerate(machine.gpus) if i in chosen])
        complete = len(around.gpu_busy) == len(every)
        around.gpu_busy = [share for i, share in enumerate(around.gpu_busy) if i in chosen] if complete else []
    return replace(
        machine,
        cores=max((p.cores for p in processes if p.cores), default=machine.cores),
        memory=min([machine.memory, *(p.memory for p in processes if p.memory is not None)]),
    )


def _least(*numbers: int | None) -> int | None:
    return min((n for n in numbers if n is not None), default=None)
