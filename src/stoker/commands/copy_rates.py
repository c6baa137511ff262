"""How fast batches can reach the device here: what ``stoker check`` measures where there is one.

From pageable memory (the driver copies through a buffer of its own), from memory that torch has page-locked, and from
memory that was locked where it lay (cudaHostRegister), which is what stoker's slots are.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

SIZES = [1 << n for n in range(10, 31, 2)]  # 1 KiB to 1 GiB
KINDS = ("pageable", "pinned", "registered")
REPEATS = 5
LOCKED = 1 << 28  # bytes that are locked to see what that costs


class Bench(Protocol):
    """What is measured with; seconds each. Tests have one without a device."""

    name: str

    def copy(self, kind: str, nbytes: int) -> float:
        """One copy to the device. Raises ``RuntimeError`` where it cannot be done."""
        ...

    def register(self, nbytes: int) -> float:
        """Locking memory that is there, and touched."""
        ...

    def overlap(self) -> float:
        """Part of the time of a copy that is hidden behind computing."""
        ...

    def node(self) -> int | None:
        """The device's NUMA node."""
        ...


@dataclass
class Copies:
    """What was measured.

    Attributes:
        device: its name.
        rates: GB/s by kind and bytes.
        register_s_per_gb: seconds to lock a gigabyte; None where it cannot be locked.
        overlap: part of a copy's time that is hidden behind computing, 0 to 1.
        node: the device's NUMA node, None where there is but one.
        distance: from the cores this process runs on to that node, 10 being the same (ACPI SLIT); None if not known.
        notes: what could not be measured, and why.
    """

    device: str
    rates: dict[str, dict[int, float]] = field(default_factory=dict)
    register_s_per_gb: float | None = None
    overlap: float | None = None
    node: int | None = None
    distance: int | None = None
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(bench: Bench, free: int, tell: Callable[[str], None] = lambda _: None) -> Copies:
    """Measures; seconds where there is a device.

    Args:
        bench: what with.
        free: bytes of memory that may be used.
        tell: gets a word now and then.
    """
    out = Copies(bench.name, node=bench.node())
    out.distance = distance(out.node)
    for kind in KINDS:
        out.rates[kind] = {}
        for nbytes in SIZES:
            if 4 * nbytes > free:
                out.notes.append(f"{nbytes >> 20:,} MiB and more: too little memory is free")
                break
            tell(f"{kind} {nbytes >> 10:,} KiB")
            try:
                took = statistics.median(bench.copy(kind, nbytes) for _ in range(REPEATS))
            except RuntimeError as e:
                out.notes.append(f"{kind}, {nbytes:,} bytes: {str(e).splitlines()[0]}")
                break
            out.rates[kind][nbytes] = nbytes / took / 1e9
    try:
        out.register_s_per_gb = bench.register(LOCKED) / LOCKED * 1e9
        out.overlap = bench.overlap()
    except RuntimeError as e:
        out.notes.append(str(e).splitlines()[0])
    return out


def distance(node: int | None, root: Path = Path("/sys/devices/system/node")) -> int | None:
    """How far the cores granted are from a NUMA node, at the most."""
    if node is None or not hasattr(os, "sched_getaffinity"):
        return None
    mine = os.sched_getaffinity(0)
    try:
        row = [int(x) for x in (root / f"node{node}" / "distance").read_text().split()]
        nodes = sorted(int(p.name[4:]) for p in root.glob("node[0-9]*"))
        near = [n for n in nodes if mine & _cpus((root / f"node{n}" / "cpulist").read_text())]
    except (OSError, ValueError):
        return None
    found = dict(zip(nodes, row, strict=False))
    return max((found[n] for n in near if n in found), default=None)


def _cpus(text: str) -> set[int]:
    out: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        out |= set(range(int(first), int(last or first) + 1))
    return out


class CudaBench:
    """Measures on the current CUDA device.

    Raises:
        RuntimeError: there is none.
    """

    def __init__(self) -> None:
        import torch

        from ..device.cuda import Cuda

        self._torch, self._cuda = torch, Cuda()
        self._device = torch.cuda.current_device()
        self.name = torch.cuda.get_device_name(self._device)
        self._held: dict[tuple[str, int], tuple[Any, Any]] = {}

    def copy(self, kind: str, nbytes: int) -> float:
        torch = self._torch
        if (kind, nbytes) not in self._held:
            self._drop()
            source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=kind == "pinned")
            if kind == "registered":
                failed = self._cuda.register(source.data_ptr(), nbytes)
                if failed:
                    raise RuntimeError(failed)
            target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            target.copy_(source)
            self._held[kind, nbytes] = source, target
        source, target = self._held[kind, nbytes]
        times = max(1, min(64, (1 << 24) // nbytes))  # small ones in a row: a single one is all launch
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / times

    def _drop(self) -> None:
        for (kind, _), (source, _target) in self._held.items():
            if kind == "registered":
                self._cuda.unregister(source.data_ptr())
        self._held.clear()

    def register(self, nbytes: int) -> float:
        import ctypes

        self._drop()
        memory = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(address, 1, nbytes)
        began = time.perf_counter()
        failed = self._cuda.register(address, nbytes)
        took = time.perf_counter() - began
        if failed:
            raise RuntimeError(failed)
        self._cuda.unregister(address)
        return took

    def overlap(self) -> float:
        torch = self._torch
        source = torch.ones(1 << 28, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        a = torch.randn(4096, 4096, device="cuda")
        side = torch.cuda.Stream()

        def compute() -> None:
            for _ in range(20):
                torch.mm(a, a)

        def copy() -> None:
            with torch.cuda.stream(side):
                target.copy_(source, non_blocking=True)

        def both() -> None:
            copy()
            compute()

        def seconds(what: Callable[[], None]) -> float:
            what()
            times = []
            for _ in range(REPEATS):
                torch.cuda.synchronize()
                began = time.perf_counter()
                what()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
            return statistics.median(times)

        alone, busy, together = seconds(copy), seconds(compute), seconds(both)
        return max(0.0, min(1.0, (alone + busy - together) / min(alone, busy)))

    def node(self) -> int | None:
        bus = self._torch.cuda.get_device_properties(self._device)
        name = f"{getattr(bus, 'pci_domain_id', 0):04x}:{getattr(bus, 'pci_bus_id', 0):02x}:"
        name += f"{getattr(bus, 'pci_device_id', 0):02x}.0"
        try:
            node = int((Path("/sys/bus/pci/devices") / name / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None


def text(found: Copies, columns: int = 80) -> str:
    """For a terminal: a bar for each size and kind, and what else there is to say."""
    best = max((rate for by in found.rates.values() for rate in by.values()), default=0.0)
    out = [f"copies to {found.device}, GB/s"]
    wide = max(10, min(40, columns - 34))
    for nbytes in SIZES:
        for kind in KINDS:
            rate = found.rates.get(kind, {}).get(nbytes)
            if rate is not None:
                size = f"{nbytes >> 10:,} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20:,} MiB"
                label = size if kind == KINDS[0] else ""
                out.append(f"{label:>9}  {kind:<10} {'#' * max(1, round(rate / best * wide)):<{wide}} {rate:.3g}")
    if found.register_s_per_gb is not None:
        out.append(f"page-locking memory that is there: {found.register_s_per_gb:.2f} s a GB")
    if found.overlap is not None:
        out.append(f"{found.overlap:.0%} of a copy is hidden behind computing")
    if found.node is not None:
        where = "" if found.distance is None else f"; the cores granted are at distance {found.distance} (10: the same)"
        out.append(f"the device is at NUMA node {found.node}{where}")
    return "\n".join([*out, *found.notes])


def svg(found: Copies) -> str:
    """A plot: GB/s against bytes, both axes logarithmic."""
    import math
    from html import escape

    colours = {"pageable": "#999999", "pinned": "#1f77b4", "registered": "#d62728"}
    rates = [rate for by in found.rates.values() for rate in by.values()]
    low, high = math.log10(min(rates, default=0.1)), math.log10(max(rates, default=1.0))
    span = max(0.1, high - low)

    def at(nbytes: int, rate: float) -> str:
        x = 60 + (math.log2(nbytes) - 10) / 20 * 500
        return f"{x:.1f},{330 - (math.log10(rate) - low) / span * 290:.1f}"

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 390" font-family="sans-serif" font-size="12">',
        '<rect width="620" height="390" fill="white"/>',
        f'<text x="60" y="20">copies to {escape(found.device)}, GB/s</text>',
    ]
    for exponent in range(10, 31, 4):
        x = 60 + (exponent - 10) / 20 * 500
        label = f"{1 << exponent - 10} KiB" if exponent < 20 else f"{1 << exponent - 20} MiB"
        parts.append(
            f'<line x1="{x}" y1="40" x2="{x}" y2="330" stroke="#eee"/><text x="{x - 18}" y="348">{label}</text>'
        )
    for power in range(math.ceil(low), math.floor(high) + 1):
        y = 330 - (power - low) / span * 290
        parts.append(f'<line x1="60" y1="{y:.1f}" x2="560" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="54" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for k, (kind, colour) in enumerate(colours.items()):
        points = " ".join(at(n, rate) for n, rate in sorted(found.rates.get(kind, {}).items()))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{70 + 110 * k}" y="375" fill="{colour}">{kind}</text>')
    return "".join([*parts, "</svg>"])
