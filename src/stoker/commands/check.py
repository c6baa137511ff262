"""``stoker check`` for people: what the machine grants, and what looks wrong."""

from __future__ import annotations

import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from ..core import output, resources
from ..core.resources import Machine
from ..core.terminal import colour_wanted, human_bytes, style, width

LABEL = 16  # columns


def run(json_path: Path | None) -> int:
    """Runs the command. Returns its exit code.

    Raises:
        UsageError: no file can be written there.
    """
    output.check(json_path)
    grant = resources.read()
    why, copies = "pin_memory=False: there is no accelerator", None
    if grant.gpus:
        from ..device.pin_policy import decide, facts

        why, copies = str(decide(facts())), _copies()

    def show() -> None:
        print(render(grant, sys.stdout, why))
        if copies is not None:
            print(f"\n{copies}")

    more = {"versions": versions(), "pin_memory": why, "copies": copies and copies.as_dict()}
    output.give({**grant.as_dict(), **more}, json_path, show)
    return 0


def _copies() -> Any:
    """How fast copies to the device are; None where CUDA does not reach one."""
    import torch

    from ..device.cuda import Cuda
    from . import copy_rates

    try:
        return copy_rates.measure(torch, Cuda())
    except (RuntimeError, AssertionError) as e:
        sys.stderr.write(f"stoker: copies to the device are not measured: {str(e).splitlines()[0]}\n")
        return None


def versions() -> dict[str, str | None]:
    """Versions of what matters, without importing any of it; None where it is not installed."""
    out: dict[str, str | None] = {}
    for name in ("stoker", "torch", "numpy"):
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = None
    return out


def render(m: Machine, stream: TextIO, pinning: str) -> str:
    """The text, no wider than the stream. ``pinning``: what ``pin_memory="auto"`` comes to, and why."""
    colour, columns = colour_wanted(stream), width(stream)
    out = []
    for name, value in [*_rows(m), ("pinning", pinning)]:
        wrapped = textwrap.wrap(value, max(20, columns - LABEL)) or [""]
        out.append(style(f"{name:<{LABEL}}", "bold", colour) + wrapped[0])
        out += [" " * LABEL + line for line in wrapped[1:]]
    out.append("")
    if not m.warnings:
        out.append(style("nothing looks wrong", "green", colour))
    for warning in m.warnings:
        lines = textwrap.wrap(warning, columns - 2)
        out.append(style("! ", "yellow", colour) + lines[0])
        out += ["  " + line for line in lines[1:]]
    return "\n".join(out)


def _rows(m: Machine) -> list[tuple[str, str]]:
    quota = f", quota {m.cpu_quota:g}" if m.cpu_quota is not None else ", no quota"
    limit = f"cgroup limit {human_bytes(m.memory_limit)}" if m.memory_limit else "no cgroup limit"
    rows = [
        ("cores", f"{m.cores} granted (affinity {m.cores_affinity} of {m.cores_host}{quota})"),
        ("memory", f"{human_bytes(m.memory)} granted ({limit}), {human_bytes(m.memory_available)} available"),
        ("swap in use", human_bytes(m.swap_used)),
        ("/dev/shm", "none" if m.shm is None else f"{human_bytes(m.shm)}, {human_bytes(m.shm_free or 0)} free"),
        ("page-lock limit", "unlimited" if m.memlock is None else human_bytes(m.memlock)),
        ("open files", "unlimited" if m.open_files is None else f"{m.open_files:,}"),
        ("pressure", ", ".join(f"{k} {v:.0f} %" for k, v in m.pressure.items()) or "not told by this kernel"),
    ]
    for gpu in m.gpus or []:
        memory = f", {human_bytes(gpu.memory)}" if gpu.memory else ""
        busy = f", {gpu.utilisation:.0f} % busy" if gpu.utilisation is not None else ""
        rows.append(("gpu", f"{gpu.name}{memory}{busy}"))
    if not m.gpus:
        rows.append(("gpu", "none seen"))
    named = ", ".join(f"{k} {v or 'not installed'}" for k, v in versions().items())
    rows.append(("versions", f"python {m.python}, {named}"))
    rows.append(("platform", m.platform))
    return rows
