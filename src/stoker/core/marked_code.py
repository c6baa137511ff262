"""Functions whose code was replaced by the same code with marks (see ``staging.branches``), and what they were."""

from __future__ import annotations

import types

CODES: dict[types.CodeType, types.CodeType] = {}  # with marks: without them


def original(code: types.CodeType) -> types.CodeType:
    """The user's code of a function, without marks."""
    return CODES.get(code, code) if CODES else code
