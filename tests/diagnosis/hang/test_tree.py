"""Which process of a job is what: made-up command lines, in the shapes that real jobs have."""

from __future__ import annotations

import pytest

from stoker.diagnosis.hang import tree
from stoker.diagnosis.hang.proc import Identity

TRAIN = ("python", "train.py")
FORKSERVER = ("python", "-c", "from multiprocessing.forkserver import main")
SPAWN = ("python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork")
# Each process: its id, its parent's, the name of its main thread, its command line, and what it is.
JOBS = {
    "forked workers": [
        (1, 0, "python", TRAIN, "loop"),
        (2, 1, "pt_data_worker", TRAIN, "worker"),
        (3, 1, "stoker_worker", TRAIN, "worker"),
        (4, 2, "sh", ("sh", "-c", "true"), "other"),
    ],
    "torch before 2.6": [(1, 0, "python", TRAIN, "loop"), (2, 1, "python", TRAIN, "worker")],
    "spawned workers": [
        (1, 0, "python", TRAIN, "loop"),
        (2, 1, "python", ("python", "-c", "from multiprocessing.resource_tracker import main"), "helper"),
        (3, 1, "python", SPAWN, "worker"),
    ],
    "a fork server": [
        (1, 0, "python", TRAIN, "loop"),
        (2, 1, "python", FORKSERVER, "helper"),
        (3, 2, "pt_data_worker", FORKSERVER, "worker"),
    ],
    "two ranks of torchrun": [
        (1, 0, "torchrun", ("python", "torchrun", "train.py"), "launcher"),
        (2, 1, "python", TRAIN, "loop"),
        (3, 1, "python", TRAIN, "loop"),
        (4, 2, "pt_data_worker", TRAIN, "worker"),
    ],
    "two ranks that were spawned": [
        (1, 0, "python", TRAIN, "launcher"),
        (2, 1, "python", SPAWN, "loop"),
        (3, 2, "pt_data_worker", SPAWN, "worker"),
    ],
    "stoker run": [
        (1, 0, "stoker", ("python", "stoker", "run", "train.py"), "launcher"),
        (2, 1, "python", TRAIN, "loop"),
        (3, 2, "stoker_worker", TRAIN, "worker"),
    ],
    "a shell script": [(1, 0, "bash", ("bash", "train.sh"), "other"), (2, 1, "python", TRAIN, "loop")],
}


@pytest.mark.parametrize("name", JOBS)
def test_what_each_process_is(name: str) -> None:
    known = {
        pid: Identity(pid, parent, title, command, "S", command[0] == "python")
        for pid, parent, title, command, _ in JOBS[name]
    }
    found = tree.roles(known)
    assert found == {pid: role for pid, _, _, _, role in JOBS[name]}
    for pid, role in found.items():
        if role == "worker":
            loop = tree.loop_of(pid, known, found)
            assert loop is not None
            assert found[loop] == "loop"
