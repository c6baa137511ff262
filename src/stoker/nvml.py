"""Which GPUs there are and how busy, from outside the process that uses them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any


class Nvml:
    """How busy each GPU is, asked again and again; nothing where there is no NVML."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._nvml: Any = None
        with contextlib.suppress(Exception):  # not installed; no driver
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    def busy(self) -> list[float]:
        """Per cent of the last second or less in which a kernel ran, by GPU (NVML, nvmlDeviceGetUtilizationRates)."""
        try:
            return [float(self._nvml.nvmlDeviceGetUtilizationRates(h).gpu) for h in self._handles]
        except Exception:  # not supported on this device
            return []

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
        self._handles, self._nvml = [], None


@dataclass(frozen=True)
class Gpu:
    """One accelerator: name, total and free memory in bytes, utilisation in per cent (None where unknown)."""

    name: str
    memory: int | None
    memory_free: int | None
    utilisation: float | None


def gpus() -> list[Gpu]:
    """By NVML where pynvml is installed, else by nvidia-smi, else none. Never initialises CUDA."""
    try:
        import pynvml
    except ImportError:
        return _by_smi()
    try:
        pynvml.nvmlInit()
    except Exception:
        return []
    try:
        out = []
        for i in range(pynvml.nvmlDeviceGetCount()):
            h = pynvml.nvmlDeviceGetHandleByIndex(i)
            name = pynvml.nvmlDeviceGetName(h)
            mem = pynvml.nvmlDeviceGetMemoryInfo(h)
            try:
                use: float | None = float(pynvml.nvmlDeviceGetUtilizationRates(h).gpu)
            except Exception:  # not supported on this device
                use = None
            out.append(Gpu(name.decode() if isinstance(name, bytes) else name, int(mem.total), int(mem.free), use))
        return out
    except Exception:
        return []
    finally:
        pynvml.nvmlShutdown()


def _by_smi() -> list[Gpu]:
    smi = shutil.which("nvidia-smi")
    if not smi:
        return []
    query = "--query-gpu=name,memory.total,memory.free,utilization.gpu"
    try:
        p = subprocess.run([smi, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    out = []
    for line in p.stdout.splitlines() if p.returncode == 0 else []:
        name, total, free, use = ([*(f.strip() for f in line.split(",")), "", "", ""])[:4]
        mib = [int(v) << 20 if v.isdigit() else None for v in (total, free)]
        out.append(Gpu(name, mib[0], mib[1], float(use) if use.isdigit() else None))
    return out
