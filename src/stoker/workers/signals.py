"""Delays Ctrl-C during a fork, so it is neither lost nor interrupts the parent before the child is recorded."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

# the script's SIGINT handler while the main thread forks; a child restores it
_handler: Callable[[int, FrameType | None], object] | None = None


@contextlib.contextmanager
def waits() -> Iterator[None]:
    """Delays Ctrl-C until the block ends. Blocking the signal is not enough: another thread takes it then, and the
    handler still runs in the main thread, maybe in an ``os.register_at_fork`` hook, which drops exceptions."""
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


def ignore() -> None:
    """In a worker that may wait for its loader's next iterator: ignores signals to the whole process group. The script
    may handle them, and expects no workers between two epochs. Its process ends the workers, and they end with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def begin() -> None:
    """Restores the handler in a child, which never reaches the end of ``waits``."""
    global _handler
    handler, _handler = _handler, None
    if callable(handler):
        signal.signal(signal.SIGINT, handler)
