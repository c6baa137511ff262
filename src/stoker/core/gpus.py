"""GPUs and their utilisation, seen from outside the process that uses them.

Read with NVML (``nvidia-ml-py``, the extra ``stoker[gpu]``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def visible_gpus(gpus: Sequence[tuple[int, str]], visible: str | None) -> list[int]:
    """Positions of the GPUs that a process may use, in its order. NVML lists all GPUs of the host, each with index and
    UUID. ``visible``: CUDA_VISIBLE_DEVICES: indices or beginnings of UUIDs; an invalid one ends the list (CUDA C++
    Programming Guide, "CUDA Environment Variables"). None: not set, so all.

    Example:
        >>> visible_gpus([(0, "GPU-ab"), (1, "GPU-cd")], "1"), visible_gpus([(0, "GPU-ab"), (1, "GPU-cd")], "GPU-a,7,1")
        ([1], [0])
    """
    if visible is None:
        return list(range(len(gpus)))
    found: list[int] = []
    for word in visible.replace(" ", "").split(","):
        if word.startswith("MIG-"):  # a slice of a GPU; the name does not say which GPU
            return list(range(len(gpus)))
        fits = [
            i for i, (n, uuid) in enumerate(gpus) if word == str(n) or (word[:4] == "GPU-" and uuid.startswith(word))
        ]
        if len(fits) != 1:
            break
        found += [i for i in fits if i not in found]
    return found


@dataclass(frozen=True)
class Gpu:
    """One accelerator: name, memory in bytes, utilisation in per cent (None if unknown), index on the host, and
    UUID."""

    name: str
    memory: int
    utilisation: float | None
    index: int
    uuid: str


class Nvml:
    """The GPUs that this process may use (CUDA_VISIBLE_DEVICES); empty without NVML. Does not initialise CUDA."""

    def __init__(self) -> None:
        self._handles: dict[int, object] = {}  # by index
        self._nvml: Any = None
        with contextlib.suppress(Exception):  # not installed; no driver
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            every = [(i, self._uuid(handle)) for i, handle in enumerate(handles)]
            self._handles = {i: handles[i] for i in visible_gpus(every, os.environ.get("CUDA_VISIBLE_DEVICES"))}

    def _uuid(self, handle: object) -> str:
        try:
            return _text(self._nvml.nvmlDeviceGetUUID(handle))
        except Exception:  # not supported on this device
            return ""

    def _use(self, handle: object) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except Exception:  # as above
            return None

    def busy(self) -> list[float]:
        """Per cent of the last second or less in which a kernel ran, by GPU (NVML); empty if any GPU does not report
        it."""
        found = [self._use(handle) for handle in self._handles.values()]
        return [] if None in found else [share for share in found if share is not None]

    def gpus(self) -> list[Gpu]:
        out = []
        with contextlib.suppress(Exception):
            for i, handle in self._handles.items():
                name = _text(self._nvml.nvmlDeviceGetName(handle))
                memory = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total)
                out.append(Gpu(name, memory, self._use(handle), i, self._uuid(handle)))
        return out

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
        self._handles, self._nvml = {}, None


def gpus() -> list[Gpu]:
    with contextlib.closing(Nvml()) as nvml:
        return nvml.gpus()


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
