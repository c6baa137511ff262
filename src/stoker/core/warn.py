"""Warnings that point at the user's line, however many frames of stoker and torch lie between."""

from __future__ import annotations

import sys
import warnings

from . import packages
from .errors import StokerWarning


def warn_user(message: str, category: type[Warning] = StokerWarning) -> None:
    """Warns at the innermost frame that is neither stoker's nor torch's. Raises only where a filter for this category
    says so."""
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
            raise  # that is asked for
        sys.stderr.write(f"stoker: {message}\n")  # a script that turns all warnings into errors must not end
