"""Rules about the accelerator: copies to it, waiting for it, page-locked memory."""

from __future__ import annotations

from .loader_stats import LoaderStats, RuleFinding

MIN_PAGEABLE = 0.05  # of the loop
BUS = 12e9  # bytes/s of a page-locked copy over PCIe 3.0 x16: the cost that remains after the fix
MIN_IDLE = 0.05  # of the loop: the device is idle although it has its data
MOST_STEPS = 0.5  # calls per step
MIN_IDLE_BY_LAUNCHES = 0.3  # of the time: the device is idle although it has its data
LAUNCHES = 0.8, 2.0  # cores that launching uses: the consumer's thread, and backward()'s for part of a step
SHORT_STEP_S = 0.05  # longer steps do more than launch kernels
MAX_PINNED = 0.3  # of the granted memory
MIN_AVAILABLE = 0.1  # of the granted memory, when least was available


def pageable_transfer(stats: LoaderStats) -> RuleFinding | None:
    """Batches are copied to the device from memory that is not page-locked. The driver first copies them to a buffer
    on the host, and the call waits for that (CUDA C++ Best Practices Guide, "Pinned Memory")."""
    found, part = stats.crossings("pageable")
    if found is None or part < MIN_PAGEABLE:
        return None
    device, pinned = stats.loader.device, stats.loader.settings.pin_memory
    left = min(part, found.bytes / BUS / device.seconds)
    advice = "give the batch's type a pin_memory() method" if pinned else "pin_memory=True"
    return RuleFinding(
        part,
        {"line": found.line, "ms_per_step": found.seconds / device.steps * 1e3},
        f"copies to the device at {found.line} take {part:.0%} of the loop, because their memory is not page-locked: "
        f"{advice}, and use .to(device, non_blocking=True)",
        1 / (1 - part + left),
        {} if pinned else {"pin_memory": True},
    )


def sync_transfer(stats: LoaderStats) -> RuleFinding | None:
    """Each step waits for the device (``.item()``, or ``.to()`` from page-locked memory without ``non_blocking``).

    The device then idles until the host launches more work. Without the wait the loop would run as fast as the slower
    of host and device. So the fix gains at most the time that the host waits, and at most the device's idle time."""
    if stats.idle is None:
        return None
    waits, waiting = stats.crossings("sync")
    copies, copying = stats.crossings("blocking")
    share = min(stats.idle, waiting + copying)
    if share < MIN_IDLE:
        return None
    found = waits if copies is None or waiting >= copying else copies
    steps = stats.loader.device.steps
    if found is None or found.calls < MOST_STEPS * steps:
        return None
    advice = "non_blocking=True" if found is copies else "keep it on the device and read it every hundredth step"
    return RuleFinding(
        share,
        {"line": found.line, "calls_per_step": found.calls / steps, "blocked_share": waiting + copying},
        f"each step waits for the device at {found.line}, and the device idles {stats.idle:.0%} of the time with its "
        f"data there: {advice}",
        1 / (1 - share),
    )


def batch_too_small(stats: LoaderStats) -> RuleFinding | None:
    """The host cannot launch kernels as fast as the device runs them: there are many, and each is small."""
    idle = stats.idle
    if idle is None or idle < MIN_IDLE_BY_LAUNCHES or sync_transfer(stats) is not None:
        return None
    used = stats.step_cpu / stats.step if stats.step else 0.0
    if not LAUNCHES[0] <= used <= LAUNCHES[1] or not 0 < stats.step < SHORT_STEP_S:
        return None
    size = stats.loader.settings.batch_size
    return RuleFinding(
        idle,
        {"step_cpu_share": used, "step_ms": stats.step * 1e3},
        f"steps of {stats.step * 1e3:.3g} ms keep a core busy with launches and leave the device idle {idle:.0%} of "
        f'the time: a larger batch than {size}, torch.compile(mode="reduce-overhead"), or CUDA graphs',
        1 / (1 - idle),
    )


def pin_memory_wasted(stats: LoaderStats) -> RuleFinding | None:
    """Batches are copied to page-locked memory although there is no accelerator."""
    if not stats.loader.settings.pin_memory or stats.cuda or stats.gpus:
        return None
    return RuleFinding(0.0, {}, "pin_memory=False: there is no accelerator", change={"pin_memory": False})


def pin_memory_exhausts_ram(stats: LoaderStats) -> RuleFinding | None:
    """Page-locked memory leaves too little for everything else. It cannot be swapped or reclaimed, and torch's
    allocator rounds each block up and keeps it."""
    pinned, available = stats.loader.device.pinned_bytes, stats.around.memory_available_min
    if not stats.loader.settings.pin_memory or not stats.memory or available is None:
        return None
    if pinned < MAX_PINNED * stats.memory or available > MIN_AVAILABLE * stats.memory:
        return None
    return RuleFinding(
        0.0,
        {"pinned_bytes": pinned, "memory_bytes": stats.memory, "memory_available_min": available},
        f"{pinned >> 20:,} MB are page-locked, and {available >> 20:,} MB were left: use fewer workers or a smaller "
        "prefetch_factor",
    )
