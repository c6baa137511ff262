"""Pausing the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disables garbage collection inside the ``with``.

    For code that parses or compiles in a user's process. A collection runs finalizers, and one of them may parse as
    well: torch's iterators raise in a forked worker, and the hook of a test runner or notebook formats that error.
    CPython before 3.11.8 and 3.12.2 then raises SystemError from the interrupted parse (gh-106905)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
