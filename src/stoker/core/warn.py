"""Warnings that point at the user's line, whatever number of stoker and torch frames lies between."""

from __future__ import annotations

import contextlib
import sys
import warnings

from . import packages
from .errors import StokerWarning

_written: list[set[str]] = []  # not empty: warnings are written to the terminal; holds those that were


def to_terminal() -> None:
    """From now on, warnings are lines on the terminal: a script that does not know stoker may collect Python's
    warnings, and what is written to ``sys.stderr``, in its own log."""
    if not _written:
        _written.append(set())


def warn_user(message: str, category: type[Warning] = StokerWarning) -> None:
    """Warns at the innermost frame outside stoker and torch. Raises only if a filter for this category makes it an
    error."""
    if _written and category is StokerWarning:
        if sys.__stderr__ is not None and message not in _written[0]:
            _written[0].add(message)
            with contextlib.suppress(OSError, ValueError):
                sys.__stderr__.write(f"stoker: {message}\n")
        return
    libraries = (*packages.OWN, packages.torch())
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
        frame = frame.f_back
        level += 1
    try:
        warnings.warn(message, category, stacklevel=level)
    except category:
        if any(f[0] == "error" and isinstance(f[2], type) and issubclass(f[2], category) for f in warnings.filters):
            raise  # the user asked for it
        sys.stderr.write(f"stoker: {message}\n")  # a script that turns all warnings into errors must not end
