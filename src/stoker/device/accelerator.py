"""The accelerator: which one there is, how to wait for it, and how fast copies to it are.

The one module here that handles torch < 2.6, which has no ``torch.accelerator``: there only CUDA is supported.
"""

from __future__ import annotations

import time

import torch

_GENERIC = hasattr(torch, "accelerator")
_API = torch.accelerator if _GENERIC else torch.cuda


def accelerator() -> torch.device | None:
    """Returns the kind of device to copy to, without an index; None if there is only the CPU."""
    if _GENERIC:
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cuda") if torch.cuda.is_available() else None


def current_device() -> torch.device | None:
    """Returns the device that this process computes on, with its index; None if that is the CPU."""
    device = accelerator()
    return None if device is None else torch.device(device.type, current_index())


def current_index() -> int:
    """Returns the index of the device that this process computes on."""
    return torch.accelerator.current_device_index() if _GENERIC else torch.cuda.current_device()


def set_index(index: int) -> None:
    """Makes this thread compute on that device from now on."""
    if _GENERIC:
        torch.accelerator.set_device_index(index)
    else:
        torch.cuda.set_device(index)


def device_count() -> int:
    """Returns the number of devices of the accelerator's kind."""
    return 0 if accelerator() is None else int(_API.device_count())


def copy_rates(device: torch.device, nbytes: int) -> tuple[float, float]:
    """Measures bytes per second to the device, from pageable and from page-locked memory."""
    plain = torch.zeros(nbytes, dtype=torch.uint8)
    rates = []
    for source in (plain, plain.pin_memory()):
        best = 0.0
        for _ in range(5):
            _API.synchronize()
            began = time.perf_counter()
            source.to(device, non_blocking=True)
            _API.synchronize()
            best = max(best, nbytes / (time.perf_counter() - began))
        rates.append(best)
    return rates[0], rates[1]
