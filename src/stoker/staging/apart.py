"""Trying things out in a child process, so that nothing a dataset opens or changes on the way is there afterwards.

A file that a dataset opens when it is first used must not be open when workers are forked: they would share its
position.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from .. import lifecycle
from ..errors import StokerError, UsageError

DIED = "it ended the process it was tried in"


def apart(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns, called in a forked child; plain values that JSON has. Here, where there is no fork.

    Raises:
        UsageError: ``fn`` raised one, or the child died.
    """
    if sys.platform != "linux":
        return fn()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            _child(fn, writer)
        finally:
            os._exit(0)
    os.close(writer)
    parts = []
    try:
        while part := os.read(reader, 1 << 16):
            parts.append(part)
    finally:
        os.close(reader)
        lifecycle.kill(child)  # it is done, or nobody wants to know any more
    if not parts:
        raise UsageError(DIED)
    answer = json.loads(b"".join(parts))
    if "error" in answer:
        raise UsageError(answer["error"])
    return answer["value"]


def _child(fn: Callable[[], Any], writer: int) -> None:
    torch.set_num_threads(1)  # OpenMP's own threads have stayed in the parent
    threading.excepthook = lambda _: None
    try:
        answer = {"value": fn()}
    except StokerError as e:
        answer = {"error": str(e)}
    except BaseException as e:
        answer = {"error": f"{type(e).__name__}: {e}"}
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(writer, data) :]
