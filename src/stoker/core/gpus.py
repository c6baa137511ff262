"""GPUs and how busy they are, seen from outside the process that uses them.

They are read with NVML (``nvidia-ml-py``, the extra ``stoker[gpu]``), else with ``nvidia-smi``, which takes seconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def visible_gpus(gpus: Sequence[tuple[int, str]], visible: str | None) -> list[int]:
    """Positions of the GPUs that a process may use, in its order. NVML and nvidia-smi show all of the host.

    Args:
        gpus: index and UUID of each.
        visible: CUDA_VISIBLE_DEVICES: indices or beginnings of UUIDs; an invalid one ends the list (CUDA C++
            Programming Guide, "CUDA Environment Variables"). None: not set, so all.

    Example:
        >>> visible_gpus([(0, "GPU-ab"), (1, "GPU-cd")], "1"), visible_gpus([(0, "GPU-ab"), (1, "GPU-cd")], "GPU-a,7,1")
        ([1], [0])
    """
    if visible is None:
        return list(range(len(gpus)))
    found: list[int] = []
    for word in visible.replace(" ", "").split(","):
        if word.startswith("MIG-"):  # a part of a GPU; the name does not say of which one
            return list(range(len(gpus)))
        fits = [
            i for i, (n, uuid) in enumerate(gpus) if word == str(n) or (word[:4] == "GPU-" and uuid.startswith(word))
        ]
        if len(fits) != 1:
            break
        found += [i for i in fits if i not in found]
    return found


def _own(gpus: Sequence[tuple[int, str]]) -> list[int]:
    return visible_gpus(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


class Nvml:
    """How busy each GPU is that this process may use; no GPUs without NVML."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._nvml: Any = None
        with contextlib.suppress(Exception):  # not installed; no driver
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            self._handles = [handles[i] for i in _own([(i, _uuid(pynvml, h)) for i, h in enumerate(handles)])]

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
    """One accelerator: name, total and free memory in bytes, utilisation in per cent (None if unknown), its index among
    all GPUs of the host, and its UUID."""

    name: str
    memory: int | None
    memory_free: int | None
    utilisation: float | None
    index: int = 0
    uuid: str = ""


def gpus() -> list[Gpu]:
    """The GPUs that this process may use (CUDA_VISIBLE_DEVICES). CUDA is not initialised."""
    found = _all()
    return [found[i] for i in _own([(gpu.index, gpu.uuid) for gpu in found])]


def _all() -> list[Gpu]:
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
            name = _text(pynvml.nvmlDeviceGetName(h))
            mem = pynvml.nvmlDeviceGetMemoryInfo(h)
            try:
                use: float | None = float(pynvml.nvmlDeviceGetUtilizationRates(h).gpu)
            except Exception:  # not supported on this device
                use = None
            out.append(Gpu(name, int(mem.total), int(mem.free), use, i, _uuid(pynvml, h)))
        return out
    except Exception:
        return []
    finally:
        pynvml.nvmlShutdown()


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _uuid(pynvml: Any, handle: Any) -> str:
    try:
        return _text(pynvml.nvmlDeviceGetUUID(handle))
    except Exception:  # not supported on this device
        return ""


def _by_smi() -> list[Gpu]:
    smi = shutil.which("nvidia-smi")
    if not smi:
        return []
    query = "--query-gpu=name,memory.total,memory.free,utilization.gpu,index,uuid"
    try:
        p = subprocess.run([smi, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    out: list[Gpu] = []
    for line in p.stdout.splitlines() if p.returncode == 0 else []:
        name, total, free, use, index, uuid = ([*(f.strip() for f in line.split(",")), "", "", "", "", ""])[:6]
        mib = [int(v) << 20 if v.isdigit() else None for v in (total, free)]
        out.append(Gpu(name, mib[0], mib[1], float(use) if use.isdigit() else None, int(index or len(out)), uuid))
    return out
