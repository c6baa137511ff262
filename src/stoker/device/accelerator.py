"""The accelerator: which there is, and how fast bytes get there."""

from __future__ import annotations

import time
from typing import Any

import torch


def accelerator() -> Any:
    """The device to copy to, or None."""
    if hasattr(torch, "accelerator"):
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cuda") if torch.cuda.is_available() else None


def copy_rates(device: Any, nbytes: int) -> tuple[float, float]:
    """Bytes per second to the device, from pageable and from page-locked memory."""
    wait = torch.accelerator.synchronize if hasattr(torch, "accelerator") else torch.cuda.synchronize
    plain = torch.zeros(nbytes, dtype=torch.uint8)
    rates = []
    for source in (plain, plain.pin_memory()):
        best = 0.0
        for _ in range(5):
            wait()
            began = time.perf_counter()
            source.to(device, non_blocking=True)
            wait()
            best = max(best, nbytes / (time.perf_counter() - began))
        rates.append(best)
    return rates[0], rates[1]
