"""Batches are copied to the device from memory that is not page-locked: the driver copies them once more on the host,
and the call waits for it (CUDA C++ Best Practices Guide, "Pinned Memory")."""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats

LEAST = 0.05  # of the loop
BUS = 12e9  # bytes/s, of page-locked memory over PCIe 3.0 x16; what remains of a copy is guessed with it


def check(case: LoaderStats) -> Finding | None:
    found, part = case.crossings("pageable")
    if found is None or part < LEAST:
        return None
    steps, seconds = case.loader["device"]["steps"], case.loader["device"]["seconds"]
    left = min(part, found["bytes"] / BUS / seconds)
    pinned = bool(case.loader["settings"].get("pin_memory"))
    words = "give the batch's type a pin_memory() method" if pinned else "pin_memory=True"
    return Finding(
        "pageable_transfer",
        part,
        {
            "line": found["line"],
            "ms_per_step": found["seconds"] / steps * 1e3,
            "bytes_per_step": found["bytes"] / steps,
            "pin_memory": pinned,
        },
        f"copies to the device at {found['line']} take {part:.0%} of the loop, for their memory is not page-locked: "
        f"{words}, and .to(device, non_blocking=True)",
        1 / (1 - part + left),
        {} if pinned else {"pin_memory": True},
    )
