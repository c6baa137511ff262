"""Warnings that point at the user's line, whatever number of stoker and torch frames lies between."""

from __future__ import annotations

import sys
import warnings

from . import packages
from .errors import StokerWarning


def warn_user(message: str, category: type[Warning] = StokerWarning) -> None:
    """Warns at the innermost frame outside stoker and torch. Raises only if a filter for this category makes it an
    error."""
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
