"""Warnings that name the user's line, whatever calls of stoker's and torch's lie between."""

from __future__ import annotations

import sys
import warnings

from . import packages
from .errors import StokerWarning


def warn(message: str) -> None:
    """A ``StokerWarning`` at the innermost line of code that is neither stoker's nor torch's."""
    level, frame = 2, sys._getframe(1).f_back
    ours = (packages.PACKAGE, packages.torch())
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, StokerWarning, stacklevel=level + 1)
