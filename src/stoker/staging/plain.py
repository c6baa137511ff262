"""A trial's result as JSON, because nothing that ranks exchange is ever unpickled.

Only objects of the classes named here are restored, from their fields. Fields are plain values: numbers, strings,
bytes, and tuples, lists, sets and dicts of these.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any, TypeAlias

from .cut_function import Cut
from .memoize import MemoNode
from .plan import CutNode, Plan, SliceNode, WholeNode
from .pure_calls import MemoPlan
from .stages import Row
from .trial import TrialResult
from .value_digests import Entry

Plain: TypeAlias = Any  # a plain value, or its JSON representation
RECORDS = {
    c.__name__: c for c in (TrialResult, Plan, WholeNode, CutNode, SliceNode, Cut, MemoPlan, MemoNode, Row, Entry)
}
GROUPS = {c.__name__: c for c in (tuple, list, set, frozenset)}
BYTES, DICT, COUNTER = "bytes", "dict", "Counter"


def dumps(value: Plain) -> bytes:
    """Serializes a value as JSON. Raises TypeError if it is not plain."""
    return json.dumps(_tree(value)).encode()


def loads(data: bytes) -> Plain:
    """Inverse of ``dumps``. Raises ValueError, LookupError or TypeError for other data."""
    return _value(json.loads(data))


def _tree(x: Plain) -> Plain:
    """Strings and numbers represent themselves; anything else is a list that starts with its class."""
    cls: Plain = type(x)
    if x is None or cls in (bool, int, float, str):
        return x
    if cls is bytes:
        return [BYTES, x.hex()]
    if cls in GROUPS.values():
        return [cls.__name__, *map(_tree, x)]
    if cls in (dict, Counter):
        return [cls.__name__, *([_tree(k), _tree(v)] for k, v in x.items())]
    if cls in RECORDS.values():
        names = getattr(cls, "_fields", None) or [f.name for f in dataclasses.fields(cls)]
        return [cls.__name__, *(_tree(getattr(x, name)) for name in names)]
    raise TypeError(f"{cls.__name__} is not a plain value")


def _value(tree: Plain) -> Plain:
    if not isinstance(tree, list):
        return tree
    name, *inside = tree
    if name == BYTES:
        return bytes.fromhex(inside[0])
    if name in (DICT, COUNTER):
        return {DICT: dict, COUNTER: Counter}[name]({_value(k): _value(v) for k, v in inside})
    if name in GROUPS:
        return GROUPS[name](map(_value, inside))
    return RECORDS[name](*map(_value, inside))
