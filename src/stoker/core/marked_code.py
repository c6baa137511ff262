"""Functions whose code was replaced by the same code with marks (see ``staging.branches``), and what they were."""

from __future__ import annotations

import types

# By id of code with marks, which is kept alive here: that code, and the user's. To hash code takes 2 us.
_codes: dict[int, tuple[types.CodeType, types.CodeType]] = {}


def original(code: types.CodeType) -> types.CodeType:
    """The user's code of a function, without marks."""
    found = _codes.get(id(code))
    return code if found is None else found[1]


def is_marked(code: types.CodeType) -> bool:
    return id(code) in _codes


def note(marked: types.CodeType, code: types.CodeType) -> None:
    """Code with marks stands for the user's, also in the functions that are made inside."""
    _codes[id(marked)] = marked, code
    inside = [[c for c in x.co_consts if isinstance(c, types.CodeType)] for x in (marked, code)]
    if [c.co_name for c in inside[0]] == [c.co_name for c in inside[1]]:
        for inner, own in zip(*inside, strict=True):
            note(inner, own)
