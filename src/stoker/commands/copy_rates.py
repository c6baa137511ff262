"""How fast copies reach the device, for ``stoker check``.

From pageable memory (the driver copies through its own buffer), from memory that torch has page-locked, and from memory
that was page-locked in place (cudaHostRegister), as stoker's slots are.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.types import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

NBYTES = 64 << 20
REPEATS = 5


@dataclass
class CopyRates:
    """The rates of copies to one device.

    Attributes:
        device: its name.
        rates: GB/s of copies of 64 MiB, by kind of memory: pageable, pinned, registered.
        register_s_per_gb: seconds to page-lock a gigabyte in place; None if it cannot be locked.
        notes: what could not be measured, and why.
    """

    device: str
    rates: dict[str, float] = field(default_factory=dict)
    register_s_per_gb: float | None = None
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> JsonObject:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rates = ", ".join(f"{rate:.3g} from {kind} memory" for kind, rate in self.rates.items())
        out = [f"copies of {NBYTES >> 20} MiB to {self.device}, GB/s: {rates or 'none could be measured'}"]
        if self.register_s_per_gb is not None:
            out.append(f"page-locking memory in place: {self.register_s_per_gb:.2f} s a GB")
        return "\n".join([*out, *self.notes])


def measure(torch: Any, cuda: Any) -> CopyRates:
    """Measures on the current CUDA device; a second or less.

    Args:
        torch: the module; tests pass a stand-in.
        cuda: ``device.cuda.Cuda()``.

    Raises:
        RuntimeError: CUDA reaches no device.
    """
    out = CopyRates(torch.cuda.get_device_name())
    target = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")

    def seconds(source: Tensor) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    for kind in ("pageable", "pinned", "registered"):
        registered = False
        source = torch.ones(NBYTES, dtype=torch.uint8, pin_memory=kind == "pinned")
        try:
            if kind == "registered":
                began = time.perf_counter()
                failed = cuda.register(source.data_ptr(), NBYTES)
                if failed:
                    raise RuntimeError(failed)
                registered = True
                out.register_s_per_gb = (time.perf_counter() - began) / NBYTES * 1e9
            took = statistics.median(seconds(source) for _ in range(REPEATS))
            out.rates[kind] = NBYTES / took / 1e9
        except RuntimeError as e:
            out.notes.append(f"{kind} memory: {str(e).splitlines()[0]}")
        finally:
            if registered:
                cuda.unregister(source.data_ptr())
    return out
