"""What tests of several packages share."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import get_worker_info

from stoker.device import pin_policy
from stoker.workers import launch

LIMIT_S = 60  # fails on a hang, not on a busy machine


class Compose:
    """Transforms in a row, as everybody writes it."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, x: Any) -> Any:
        for t in self.transforms:
            x = t(x)
        return x


def draw() -> tuple[float, float]:
    """Random numbers as an augmentation draws them: from the worker's generators."""
    info = get_worker_info()
    rng = getattr(info, "rng", None) if info is not None and getattr(info, "worker_method", "") == "thread" else None
    python, cpu = (random, None) if rng is None else (rng.random_generator, rng.torch_generator)
    return python.random(), float(torch.rand((), generator=cpu))


def own_generator() -> torch.Generator | None:
    """torch's generator of this worker, if it is a thread. ``torch.random.thread_safe_generator()`` came with 2.12."""
    info = get_worker_info()
    if getattr(info, "worker_method", "") != "thread":
        return None
    return info.rng.torch_generator  # type: ignore[union-attr,no-any-return]


def pretend_device(patch: pytest.MonkeyPatch) -> None:
    """torch finds a device, which nothing uses, and whose runtime locks no slots, even where there is a real one."""
    cuda = torch.device("cuda")
    patch.setattr(pin_policy, "runtime", lambda: None)
    if hasattr(torch, "accelerator"):
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: cuda)
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(torch.accelerator, "set_device_index", lambda i: None)
    else:  # torch < 2.6
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "set_device", lambda i: None)


def room_for_workers(patch: pytest.MonkeyPatch, n: int) -> list[int]:
    """How many worker processes the system has room for from now on; the test may change it."""
    room = [n]
    begin, started = launch.Launcher.start, []

    def start(self: Any, *args: Any) -> Any:
        if sum(p.is_alive() for p in started) >= room[0]:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(begin(self, *args))
        return started[-1]

    patch.setattr(launch.Launcher, "start", start)
    return room


class Counted:
    """An iterator that says where it is."""

    def __init__(self, items: Sequence[int]) -> None:
        self.items, self.at = items, 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> int:
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


_children_before: set[int] = set()  # pids: of an earlier test, whose workers are just ending


def note_children() -> None:
    """A test begins."""
    _children_before.clear()
    _children_before.update(p.pid or 0 for p in multiprocessing.active_children())


def children_left() -> list[int]:
    """The pids of processes that this test has started and that have not ended."""
    return [p.pid or 0 for p in multiprocessing.active_children() if p.pid not in _children_before]


SEMAPHORES = f"mp-{os.getpid()}"  # how those of these tests are called


def name_semaphores(prefix: str = SEMAPHORES) -> None:
    """From now on this process's semaphores, and those of the processes that it starts, have that name."""
    multiprocessing.current_process()._config["semprefix"] = f"/{prefix}"  # type: ignore[attr-defined]


def shm() -> set[str]:
    """What lies in /dev/shm."""
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def left_in_shm(before: set[str]) -> set[str]:
    """What has come to stay in /dev/shm and is not another program's: of semaphores those with the name of these tests,
    of other files those that no living process uses."""

    def found() -> set[str]:
        new = {x for x in shm() - before if not x.startswith("sem.") or x.startswith(f"sem.{SEMAPHORES}-")}
        return new - used_in_shm() if new else new

    deadline = time.monotonic() + LIMIT_S
    while (left := found()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def used_in_shm() -> set[str]:
    """The files in /dev/shm that a process has open or in its memory which is neither this one nor of its making."""
    mine = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    used = []
    for pid in set(psutil.pids()) - mine:
        with contextlib.suppress(OSError):
            used.append(Path(f"/proc/{pid}/maps").read_text())
            used += [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return set(re.findall(r"/dev/shm/(\S+)", "\n".join(used)))


def flip(path: Path, at: int) -> None:
    """One bit of one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 0x40]))


def interrupt(*args: str, env: dict[str, str] | None = None) -> tuple[str, list[str]]:
    """Ctrl-C on a command of stoker's when one of its workers has said "reading". Nobody is left.

    Returns:
        What it printed, and the lines of what it said.
    """
    p = subprocess.Popen(
        [sys.executable, "-m", "stoker", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=env,
    )
    try:
        assert p.stdout is not None
        assert p.stdout.readline() == "reading\n"
        children = psutil.Process(p.pid).children(recursive=True)
        assert children
        os.killpg(p.pid, signal.SIGINT)  # as a terminal does
        out, err = p.communicate(timeout=LIMIT_S)
        assert p.returncode == 130
        assert err.splitlines()[-1] == "stoker: interrupted"
        _, alive = psutil.wait_procs(children, timeout=LIMIT_S)
        assert not alive
    finally:
        p.kill()
    return out, err.splitlines()
