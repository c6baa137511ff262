"""Finds which processes belong to a job, and the role of each."""

from __future__ import annotations

import os
import re

from ...core.errors import StokerError
from . import proc
from .proc import Identity

WORKER_NAMES = ("pt_data_worker", "stoker_worker")  # names of workers' main threads; torch sets its own since 2.6
HELPERS = re.compile(r"multiprocessing\.(resource_tracker|semaphore_tracker|forkserver)|fork_server_main")
SPAWNED = re.compile(r"multiprocessing\.spawn|--multiprocessing-fork")

Tree = dict[int, Identity]


def find(pid: int) -> Tree:
    """Finds the processes of a job: ``pid`` and its descendants or, if it is a worker, its loop and the loop's. Parents
    come before their children. Raises StokerError if the process is gone, belongs to another user, or neither is nor
    has started a Python process."""
    table = proc.parents()
    owner = proc.owner(pid)
    if pid not in table or owner is None:
        raise StokerError(
            f"there is no process {pid}: it has ended, or runs in another container or on another machine"
        )
    if not _is_ours(pid):
        raise StokerError(f"process {pid} belongs to user id {owner}: run stoker why as that user, or as root")
    top = pid
    while _belongs_to_loop(top, table) and _is_ours(table[top]):
        top = table[top]
    children: dict[int, list[int]] = {}
    for child, parent in sorted(table.items()):
        children.setdefault(parent, []).append(child)
    order = [top]
    for parent in order:
        order += [child for child in children.get(parent, []) if child != os.getpid()]
    tree = {p: found for p in order if (found := proc.identify(p)) is not None}
    if not any(found.python for found in tree.values()):
        named = tree.get(pid)
        if named is None or named.state in ("Z", "X"):
            raise StokerError(f"process {pid} has ended")
        what = os.path.basename(named.command[0]) if named.command else named.name  # empty during execve(2)
        raise StokerError(f"process {pid} is not Python ({what}), and has started no Python")
    return tree


def _is_ours(pid: int) -> bool:
    return os.geteuid() in (0, proc.owner(pid))


def _belongs_to_loop(pid: int, table: dict[int, int]) -> bool:
    """Returns whether a process is a worker or helper of its parent, which must be Python."""
    me, parent = proc.identify(pid), proc.identify(table.get(pid, 0))
    if me is None or parent is None or not parent.python:
        return False
    copied = me.python and me.command == parent.command
    return me.name in WORKER_NAMES or copied or bool(_is_helper(me) or SPAWNED.search(" ".join(me.command)))


def _is_helper(me: Identity) -> bool:
    return bool(HELPERS.search(" ".join(me.command))) and me.name not in WORKER_NAMES


def roles(tree: Tree) -> dict[int, str]:
    """Returns each process's role: loop, worker, helper, launcher (has started loops, has no workers), or other."""
    out: dict[int, str] = {}
    with_workers = {x.parent for x in tree.values() if x.name in WORKER_NAMES}
    for pid, me in tree.items():
        parent = tree.get(me.parent)
        copied = parent is not None and parent.python and me.command == parent.command
        spawned = bool(SPAWNED.search(" ".join(me.command)))
        if _is_helper(me):
            out[pid] = "helper"
        elif out.get(me.parent) == "worker":
            out[pid] = "other"  # started by the code of a sample
        elif me.name in WORKER_NAMES or ((copied or spawned) and pid not in with_workers):
            out[pid] = "worker"
        else:
            out[pid] = "loop" if me.python else "other"
    for pid in reversed(tree):
        below = {out[p] for p, x in tree.items() if x.parent == pid}
        if out[pid] == "loop" and below & {"loop", "launcher"} and "worker" not in below:
            out[pid] = "launcher"
    return out


def loop_of(pid: int, tree: Tree, role: dict[int, str]) -> int | None:
    """Returns the nearest loop among a process's ancestors; None if it has ended."""
    above = tree[pid].parent
    while above in tree and role[above] != "loop":
        above = tree[above].parent
    return above if above in tree else None
