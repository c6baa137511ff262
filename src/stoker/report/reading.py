"""The plain reading: what a person would say after a look at ``nvidia-smi``, ``top`` and ``free``, in their words."""

from __future__ import annotations

from typing import Any

from ..doctor import STARVED, Case
from .terminal import human_bytes

IDLE, FULL = 0.5, 0.9  # of a GPU's time, or of the cores
ALONE = (0.75, 1.35)  # cores at work, all together, which is one thread and what little else there is
LOOKS = 6  # at the cores: three seconds
GROWN = 1.3
WAITED = 0.3  # of the tasks' time, without computing


def sentences(report: dict[str, Any]) -> list[str]:
    """One sentence for each thing that is plain; none where nothing is.

    Args:
        report: ``machine``, ``around``, ``loaders``, ``verdict`` and ``findings`` of one.
    """
    waits = max((Case(e, 1).share for e in report["loaders"]), default=None)
    if waits is None:
        return []
    return [s for s in (_gpu(report, waits), _cores(report), _memory(report)) if s]


def _gpu(report: dict[str, Any], waits: float) -> str:
    used = [busy for busy in report["around"].get("gpu_busy", []) if busy]
    if not used:
        return ""
    busy = sum(used) / len(used)
    if busy >= FULL:
        return f"GPU {busy:.0%} busy: it computes all the time; torch.compile, AMP or a larger batch, not the loader"
    if waits >= STARVED:
        return f"GPU {busy:.0%} busy, and the loop waits for data {waits:.0%} of its time: the pipeline"
    if busy < IDLE:
        return (
            f"GPU {busy:.0%} busy, and the loop does not wait for data: the steps themselves (launches of many small "
            "kernels, .item(), logging), or a larger batch"
        )
    return ""


def _cores(report: dict[str, Any]) -> str:
    granted = int(report["machine"].get("cores", 1))
    if report["verdict"] != "input-bound" or granted < 2:
        return ""
    main = max(report["loaders"], key=lambda e: float(e["wait_s"] + e["step_s"]))
    own = _own(main)
    if own is None:
        return ""
    more = any("num_workers" in f["change"] for f in report["findings"])  # else handing over would cost as much
    if ALONE[0] <= own <= ALONE[1] and more:
        return f"one of {granted} cores at work, the rest idle, and the loop waits: too few workers"
    if own < ALONE[0] and Case(main, granted).waits >= WAITED:
        return f"the loop and its workers use {own:.1f} of {granted} cores, and the loop waits: for a disk or a network"
    if own >= FULL * granted:
        return f"all {granted} cores at work, and the loop waits: more workers bring nothing, less work a sample does"
    return ""


def _own(e: dict[str, Any]) -> float | None:
    """Cores that a loop and its workers use themselves, whoever else there is; None where that was not seen."""
    case = Case(e, 1)
    stages, total = e["stages"], case.total
    if not stages.get("worker", {}).get("tasks") or total <= 0:
        return None
    made = float(stages["worker"]["cpu_s"])
    if case.workers and e.get("kernel"):
        made = max(made, float(e["kernel"]["cpu_ns"]) / 1e9)  # with all threads of each worker
    return (made + float(stages["consumer"]["cpu_s"])) / total


def _memory(report: dict[str, Any]) -> str:
    for e in report["loaders"]:
        line = e.get("memory", {}).get("over_time", [])
        if len(line) < LOOKS:
            continue
        first, last = float(line[1][1]), float(line[-1][1])
        if last >= GROWN * first:
            return f"the workers' memory climbed from {human_bytes(first)} to {human_bytes(last)}: copies, or a leak"
    return ""
