"""Maps functions whose code was replaced by the same code with marks (see ``staging.branches``) to their original
code."""

from __future__ import annotations

import types

# id of marked code -> (marked code, user's code). Keeps both alive. Keyed by id because hashing code takes 2 us.
_codes: dict[int, tuple[types.CodeType, types.CodeType]] = {}


def original(code: types.CodeType) -> types.CodeType:
    """Returns the user's code, without marks, for the code of a function."""
    found = _codes.get(id(code))
    return code if found is None else found[1]


def is_marked(code: types.CodeType) -> bool:
    return id(code) in _codes


def note(marked: types.CodeType, code: types.CodeType) -> None:
    """Records that marked code stands for the user's code, including the functions nested in it."""
    _codes[id(marked)] = marked, code
    inside = [[c for c in x.co_consts if isinstance(c, types.CodeType)] for x in (marked, code)]
    if [c.co_name for c in inside[0]] == [c.co_name for c in inside[1]]:
        for inner, own in zip(*inside, strict=True):
            note(inner, own)
