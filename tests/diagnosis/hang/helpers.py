"""Jobs that hang on purpose, and what ``stoker why`` says of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from stoker.diagnosis.hang import causes, job
from tests.helpers import LIMIT_S

# Sample 9 hangs: a worker's second batch, so that torch's worker has a thread for its queue by then.
JOB = """
    import fcntl, os, signal, socket, subprocess, sys, threading, time
    import stoker
    import torch
    from torch.utils.data import DataLoader, Dataset

    LOCK = threading.Lock()

    class Data(Dataset):
        def __len__(self):
            return 10**6
        def __getitem__(self, i):
            if i == 9:
                print("there", flush=True)
                {hang}
            return i

    if __name__ == "__main__":
        {before}
        loader = {loader}(Data(), batch_size=4, num_workers=2, multiprocessing_context="{method}")
        for batch in loader:
            {step}
"""
LOADERS = ["DataLoader", "stoker.DataLoader"]


def script(
    folder: Path,
    hang: str,
    loader: str = "DataLoader",
    before: str = "pass",
    step: str = "pass",
    method: str = "fork",
) -> Path:
    """A training script of which sample 9 does ``hang``."""
    path = folder / "train.py"
    text = textwrap.dedent(JOB)
    path.write_text(text.format(hang=hang, loader=loader, before=before, step=step, method=method))
    return path


@contextlib.contextmanager
def running(*line: object) -> Iterator[subprocess.Popen[str]]:
    """A command of Python's that has said "there". It and all that it has started are killed at the end."""
    p = subprocess.Popen(
        [sys.executable, *map(str, line)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert p.stdout is not None
        assert p.stderr is not None
        assert p.stdout.readline() == "there\n", p.stderr.read()
        yield p
    finally:
        started = psutil.Process(p.pid).children(recursive=True) if p.returncode is None else []
        if p.returncode is None:  # at once: one that is left for a moment may start others
            os.killpg(p.pid, signal.SIGKILL)
        for child in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        p.communicate(timeout=LIMIT_S)


def until(found: Callable[[], Any], fits: Callable[[Any], object]) -> Any:
    """What is found once it fits: a process that has said "there" has not begun to wait yet. The last one after a
    minute."""
    deadline = time.monotonic() + LIMIT_S
    while not fits(seen := found()) and time.monotonic() < deadline:
        pass
    return seen


def judged(pid: int, name: str, fits: Callable[[list[job.Job]], object] = bool) -> tuple[list[job.Job], causes.Cause]:
    """What is seen of a job once the cause has that name, and the job fits."""
    found: list[list[job.Job]] = []

    def ask() -> causes.Cause:
        found.append(job.look(pid))
        return causes.judge(found[-1])

    cause = until(ask, lambda cause: cause.name == name and fits(found[-1]))
    assert cause.name == name, cause
    assert fits(found[-1]), found[-1]
    return found[-1], cause
