"""What tests of several packages share."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import get_worker_info

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
    """torch finds a device, which nothing uses."""
    cuda = torch.device("cuda")
    if hasattr(torch, "accelerator"):
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: cuda)
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(torch.accelerator, "set_device_index", lambda i: None)
    else:  # torch < 2.6
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "set_device", lambda i: None)


def shm() -> set[str]:
    """What lies in /dev/shm, where other processes' files lie, too."""
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def left_in_shm(before: set[str]) -> set[str]:
    """What has come to stay in /dev/shm. Other processes' semaphores have names there for a moment."""
    left = shm() - before
    deadline = time.monotonic() + LIMIT_S
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= shm()
    return left


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
