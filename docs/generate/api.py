"""``reference/api.md``: every public name, by what it is for; the words are those of the docstrings."""

from __future__ import annotations

import stoker

from . import Uncovered

GROUPS = {
    "Datasets": ("Staged", "split", "share", "empty"),
    "Order and ranks": ("FeistelSampler", "shard", "AllRanks"),
    "Loaders of other libraries": ("install", "installed", "uninstall", "to_device"),
    "Measuring": ("watch", "tune", "mean_std"),
    "Errors": ("StokerError", "StokerWarning"),
}
ELSEWHERE = {"DataLoader"}  # has a page of its own
BESIDE = {  # documented names that lie in a module
    "Measuring": ("stoker.commands.bench.measure", "stoker.tuning.batch_size.largest"),
}
CALLED = {"stoker.commands.bench.measure": "It is `stoker.bench.measure`."}


def page() -> dict[str, str]:
    """The page; raises ``Uncovered`` for a public name without a group."""
    grouped = {name for names in GROUPS.values() for name in names} | ELSEWHERE
    if missing := set(stoker.__all__) - grouped:
        raise Uncovered(f"GROUPS in docs/generate/api.py lack {sorted(missing)}")
    lines = ["# Python API", "", "[stoker.DataLoader](dataloader.md) has its own page.", ""]
    for group, names in GROUPS.items():
        lines += [f"## {group}", ""]
        for name in (name for name in names if name in stoker.__all__):
            lines += [f"::: stoker.{name}", ""]
        for path in BESIDE.get(group, ()):
            lines += [f"::: {path}", "", CALLED.get(path, ""), ""]
    return {"reference/api.md": "\n".join(lines)}
