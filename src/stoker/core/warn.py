"""Warnings that point at the user's line, however many frames of stoker and torch lie between."""

from __future__ import annotations

import sys
import warnings

from . import packages
from .errors import StokerWarning


def warn_user(message: str, category: type[Warning] = StokerWarning) -> None:
    """Warns at the innermost frame that is neither stoker's nor torch's."""
    libraries = (packages.PACKAGE, packages.torch())
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)
