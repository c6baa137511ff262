"""The host cannot ask for work as fast as the device does it: many small kernels, each of which costs a launch."""

from __future__ import annotations

from . import sync_transfer
from .loader_stats import Finding, LoaderStats

IDLE = 0.3  # of the time, with its data there
BUSY = 0.8  # of a core, which the consumer's own thread uses
SHORT_S = 0.05  # longer steps hold more than launches


def check(case: LoaderStats) -> Finding | None:
    idle = case.idle
    if idle is None or idle < IDLE or sync_transfer.check(case) is not None:
        return None
    used = case.step_cpu / case.step if case.step else 0.0
    if used < BUSY or not 0 < case.step < SHORT_S:
        return None
    size = case.loader["settings"].get("batch_size")
    return Finding(
        "batch_too_small",
        idle,
        {"device_idle_share": idle, "step_cpu_share": used, "step_ms": case.step * 1e3, "batch_size": size},
        f"steps of {case.step * 1e3:.3g} ms keep a core busy with launches and leave the device idle {idle:.0%} of the "
        f'time: a larger batch than {size}, torch.compile(mode="reduce-overhead"), or CUDA graphs',
        1 / (1 - idle),
    )
