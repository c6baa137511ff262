"""Kinds of workers on other machines, which other packages bring: entry points of the group ``stoker.workers``."""

from __future__ import annotations

GROUP = "stoker.workers"
HERE = ("process", "thread", "multiprocessing")


def elsewhere(method: object) -> tuple[str, str] | None:
    """Name and address in ``worker_method="NAME:ADDRESS"``, the address "" for a name alone; None: workers are on this
    machine.

    Example:
        >>> elsewhere("ray:10.0.0.1:6379"), elsewhere("process")
        (('ray', '10.0.0.1:6379'), None)
    """
    name, _, address = method.partition(":") if isinstance(method, str) else ("", "", "")
    return (name, address) if name and name not in HERE else None


def kinds() -> list[str]:
    """The names there are."""
    from importlib.metadata import entry_points  # seldom needed

    return sorted(point.name for point in entry_points(group=GROUP))
