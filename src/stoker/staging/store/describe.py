"""What a sample is made of, in words for people."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def in_words(words: str) -> str:
    """What ``leaves.take`` says of a sample's make, for people.

    Example:
        >>> in_words('["(",[["t","uint8",[3,32,32],[1024,32,1]],["i"]]]')
        '(uint8 tensor 3x32x32, int)'
    """
    try:
        return _described(json.loads(words))
    except (ValueError, TypeError, IndexError, KeyError, RecursionError):
        return "cannot be read"


def _described(tree: Any) -> str:
    word = tree[0]
    if word in ("(", "["):
        inner = ", ".join(map(_described, tree[1]))
        return f"[{inner}]" if word == "[" else f"({inner}{',' * (len(tree[1]) == 1)})"
    if word == "{":
        return "{" + ", ".join(f"{k!r}: {_described(v)}" for k, v in zip(tree[1], tree[2], strict=True)) + "}"
    if word == "N":
        name = str(tree[1])
        return f"{name[name.find(':') + 1 :]}({', '.join(map(_described, tree[2]))})"
    if word in ("t", "a"):
        dtype = tree[1] if word == "t" else np.dtype(tree[1]).name
        return f"{dtype} {'tensor' if word == 't' else 'array'} {'x'.join(map(str, tree[2]))}".rstrip()
    if word == "T":
        return f"{str(tree[1]).rpartition(':')[2]} of {_described(tree[3])}"
    if word == "P":
        return f"PIL {tree[1]} {tree[2][0]}x{tree[2][1]}"
    if word in ("M", "S"):
        return f"list of {tree[-1]:,} {tree[1] if word == 'M' else 'str'}s"
    if word == "R":
        row = ", ".join(v[1] if v[0] == "M" else "str" for v in tree[2])
        return f"list of {tree[2][0][-1]:,} {f'({row})' if tree[1] == '(' else f'[{row}]'}"
    if word == "g":
        return f"NumPy {np.dtype(tree[1]).name}"
    return {"i": "int", "f": "float", "?": "bool", "s": "str", "b": "bytes", "0": "None"}[word]
