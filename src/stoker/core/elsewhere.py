"""Worker kinds on other machines, which other packages provide as entry points of the group ``stoker.workers``."""

from __future__ import annotations

GROUP = "stoker.workers"
HERE = ("process", "thread", "multiprocessing")


def elsewhere(method: object) -> tuple[str, str] | None:
    """Splits ``worker_method="NAME:ADDRESS"`` into name and address ("" if absent). Returns None if workers run on this
    machine."""
    name, _, address = method.partition(":") if isinstance(method, str) else ("", "", "")
    return (name, address) if name and name not in HERE else None


def kinds() -> list[str]:
    """Names of the installed kinds."""
    from importlib.metadata import entry_points  # rarely needed

    return sorted(point.name for point in entry_points(group=GROUP))
