"""How busy GPUs are, from outside the process that uses them."""

from __future__ import annotations

import contextlib
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
