"""The accelerator: which there is, how to wait for it, and how fast bytes get there.

The one place that knows about torch < 2.6, which has no ``torch.accelerator``: there it is CUDA or nothing.
"""

from __future__ import annotations

import time

import torch

_GENERIC = hasattr(torch, "accelerator")


def accelerator() -> torch.device | None:
    """The kind of device to copy to, without an index; None: there is only the CPU."""
    if _GENERIC:
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cuda") if torch.cuda.is_available() else None


def current_device() -> torch.device | None:
    """The device that this process computes on, with its index; None: it is the CPU."""
    device = accelerator()
    return None if device is None else torch.device(device.type, current_index())


def current_index() -> int:
    """The number of the device that this process computes on."""
    return torch.accelerator.current_device_index() if _GENERIC else torch.cuda.current_device()


def set_index(index: int) -> None:
    """From now on this thread computes on that device."""
    if _GENERIC:
        torch.accelerator.set_device_index(index)
    else:
        torch.cuda.set_device(index)


def device_count() -> int:
    """How many devices of the accelerator's kind there are."""
    if accelerator() is None:
        return 0
    return torch.accelerator.device_count() if _GENERIC else torch.cuda.device_count()


def synchronize() -> None:
    """Waits until the device has done all that it was asked for."""
    if _GENERIC:
        torch.accelerator.synchronize()
    else:
        torch.cuda.synchronize()


def copy_rates(device: torch.device, nbytes: int) -> tuple[float, float]:
    """Bytes per second to the device, from pageable and from page-locked memory."""
    plain = torch.zeros(nbytes, dtype=torch.uint8)
    rates = []
    for source in (plain, plain.pin_memory()):
        best = 0.0
        for _ in range(5):
            synchronize()
            began = time.perf_counter()
            source.to(device, non_blocking=True)
            synchronize()
            best = max(best, nbytes / (time.perf_counter() - began))
        rates.append(best)
    return rates[0], rates[1]
