"""Delays Ctrl-C during a fork: it is not lost, and it does not interrupt the parent before it has noted the child."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_handler: Any = None  # of the main thread, while it forks; a child restores it


@contextlib.contextmanager
def waits() -> Iterator[None]:
    """Ctrl-C waits until this is over. To block the signal is not enough. Another thread takes it then, and the handler
    still runs in the main thread, perhaps in a hook of ``os.register_at_fork``, where exceptions are printed and
    dropped."""
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


def begin() -> None:
    """In a child, which never reaches the end of ``waits``: restores the handler."""
    global _handler
    handler, _handler = _handler, None
    if callable(handler):
        signal.signal(signal.SIGINT, handler)
