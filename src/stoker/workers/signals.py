"""Ctrl-C around a fork: it is neither lost nor does it come between a fork and what has to be known of it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_handler: Any = None  # of the main thread, while it forks; a child finds its parent's here


@contextlib.contextmanager
def waits() -> Iterator[None]:
    """Ctrl-C waits until this is over.

    To block the signal is not enough: another thread takes it then, and its handler runs in the main thread all the
    same, perhaps in somebody's hook of ``os.register_at_fork``, where whatever is raised is printed and forgotten.
    """
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
    """In a child, which does not come to the end of ``waits``: the handler is what it was."""
    global _handler
    handler, _handler = _handler, None
    if callable(handler):
        signal.signal(signal.SIGINT, handler)
