"""``stoker check``: what resources this machine really grants, and what looks wrong."""

from __future__ import annotations

import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import TextIO

import click

from ..core import output, resources, terminal
from ..core.resources import Machine
from ..core.terminal import human_bytes, style
from . import arguments

LABEL_COLUMNS = 16
COPIED = 64 << 20  # bytes per timed copy


@arguments.command("check")
@click.option(
    "--json",
    "json_path",
    type=arguments.FILE,
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="Write the result as JSON. Without FILE, or with -, write it to stdout instead of the text.",
)
def command(json_path: Path | None) -> int:
    """Show what this machine really grants: cores, memory, shared memory, GPUs, and how fast copies to them are.

    \b
    Examples:
      stoker check
      stoker check --json | jq .cores
    """
    output.check(json_path)
    machine = resources.read()
    pinning = "pin_memory=False: there is no accelerator"
    copies = None
    if machine.gpus:
        from ..device.pin_policy import decide

        pinning = str(decide())
        copies = _copies()

    def show() -> None:
        print(render(machine, sys.stdout, pinning))
        if copies is not None:
            rates = ", ".join(f"{rate:.3g} from {kind} memory" for kind, rate in copies.items())
            print(f"\ncopies of {COPIED >> 20} MiB to the device, GB/s: {rates}")

    more = {"versions": versions(), "pin_memory": pinning, "copies": copies}
    output.give({**machine.as_dict(), **more}, json_path, show)
    return 0


def _copies() -> dict[str, float] | None:
    """Measures copies to the device in GB/s, from pageable and from page-locked memory; None if torch has no device."""
    from ..device.accelerator import accelerator, copy_rates

    device = accelerator()
    if device is None:
        return None
    try:
        pageable, pinned = copy_rates(device, COPIED)
    except RuntimeError as e:
        sys.stderr.write(f"stoker: copies to the device were not measured: {str(e).splitlines()[0]}\n")
        return None
    return {"pageable": pageable / 1e9, "pinned": pinned / 1e9}


def versions() -> dict[str, str | None]:
    """Returns the versions of stoker, torch and NumPy without importing them; None for one that is not installed."""
    out: dict[str, str | None] = {}
    for name in ("stoker", "torch", "numpy"):
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = None
    return out


def render(machine: Machine, stream: TextIO, pinning: str) -> str:
    """Renders the result as text no wider than the stream."""
    colour, columns = terminal.colour_wanted(stream), terminal.width(stream)
    out = [*terminal.labelled([*_rows(machine), ("pinning", pinning)], stream, LABEL_COLUMNS), ""]
    if not machine.warnings:
        out.append(style("nothing looks wrong", "green", colour))
    for warning in machine.warnings:
        text = textwrap.fill(warning, columns, initial_indent="! ", subsequent_indent="  ")
        out.append(style("! ", "yellow", colour) + text.removeprefix("! "))
    return "\n".join(out)


def _rows(m: Machine) -> list[tuple[str, str]]:
    quota = f", quota {m.cpu_quota:g}" if m.cpu_quota is not None else ", no quota"
    limit = f"cgroup limit {human_bytes(m.memory_limit)}" if m.memory_limit else "no cgroup limit"
    rows = [
        ("cores", f"{m.cores} granted (affinity {m.cores_affinity} of {m.cores_host}{quota})"),
        ("memory", f"{human_bytes(m.memory)} granted ({limit}), {human_bytes(m.memory_available)} available"),
        ("swap in use", human_bytes(m.swap_used)),
        ("/dev/shm", "none" if m.shm is None else f"{human_bytes(m.shm)}, {human_bytes(m.shm_free or 0)} free"),
        ("open files", "unlimited" if m.open_files is None else f"{m.open_files:,}"),
        ("pressure", ", ".join(f"{k} {v:.0f} %" for k, v in m.pressure.items()) or "this kernel does not report it"),
    ]
    for gpu in m.gpus:
        memory = f", {human_bytes(gpu.memory)}" if gpu.memory else ""
        busy = f", {gpu.utilisation:.0f} % busy" if gpu.utilisation is not None else ""
        rows.append(("gpu", f"{gpu.name}{memory}{busy}"))
    if not m.gpus:
        rows.append(("gpu", "none seen by NVML (pip install 'stoker[gpu]')"))
    named = ", ".join(f"{k} {v or 'not installed'}" for k, v in versions().items())
    return [*rows, ("versions", f"python {m.python}, {named}"), ("platform", m.platform)]
