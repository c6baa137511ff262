"""Delays Ctrl-C during a fork, so it is neither lost nor interrupts the parent before the child is recorded."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_handler: Any = None  # the script's SIGINT handler while the main thread forks; a child restores it


@contextlib.contextmanager
def waits() -> Iterator[None]:
    """Delays Ctrl-C until the block ends. Blocking the signal is not enough: another thread takes it then, and the
    handler still runs in the main thread. That may be in an ``os.register_at_fork`` hook, where exceptions are printed
    and dropped."""
    global _handler
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    came: list[int] = []
    before, main = _handler, threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if main else None
    if callable(handler):
        _handler = before or handler
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
            _handler = before
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if came:
            signal.raise_signal(signal.SIGINT)


def only_while_working(waits_for_iterator: Callable[[], bool]) -> None:
    """In a worker that may wait for its loader's next iterator: ignores signals to the whole process group meanwhile.
    The script may handle them, and a loader without persistent workers has none between two epochs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the script's process ends its workers

    def terminate(number: int, frame: object) -> None:
        if not waits_for_iterator():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, terminate)


def begin() -> None:
    """Restores the handler in a child, which never reaches the end of ``waits``."""
    global _handler
    handler, _handler = _handler, None
    if callable(handler):
        signal.signal(signal.SIGINT, handler)
