"""A loader as it is in its later epochs: after what happens once, a cold cache or one that is filled."""

from __future__ import annotations

from typing import Any

FEW = 5  # batches of an epoch


def filled(entry: dict[str, Any]) -> int:
    """Epochs that went by while stoker filled a cache; 0 where it did not, or where there was none after them."""
    if not (entry.get("cache") or {}).get("filled"):
        return 0
    first = max(1, int(entry.get("filled_epochs", 0)))
    return first if any(e[0] >= FEW for e in entry["by_epoch"][first:]) else 0


def later(entry: dict[str, Any]) -> dict[str, Any]:
    """The loader's waits and steps as those of its later epochs are, for as many batches."""
    epochs = entry["by_epoch"][filled(entry) :] if filled(entry) else [e for e in entry["by_epoch"] if e[0] >= FEW][1:]
    batches = sum(e[0] for e in epochs)
    wait, step = (
        sum(values) / batches * entry["batches"] for values in ([e[1] - e[3] for e in epochs], [e[2] for e in epochs])
    )
    startup = float(entry["stages"].get("startup", {}).get("wait_s", 0.0))
    return {**entry, "wait_s": startup + wait, "step_s": step}
