"""Describes a plan for reports: which stages of a sample are cached, and where the cut lies."""

from __future__ import annotations

import contextlib
import linecache
import os
import types
from typing import NamedTuple

from .plan import CutNode, PlanNode, SliceNode
from .users_code import is_users_code

LONGEST = 60  # characters of a source line
SAME = "the same each time"
DRAWS = "draws random numbers or changes something"
LATER = "comes after a random stage"


class Row(NamedTuple):
    """A stage of a dataset, for reports."""

    where: str  # file and line, or the class of a container
    name: str  # the stage: a source line, or a transform
    cached: bool  # whether its result is cached
    why: str  # the reason


def place_of(file: str, line: int) -> str:
    """File and line; the file is relative if it lies inside the working folder."""
    near = file
    with contextlib.suppress(ValueError, OSError):  # the working folder may have been removed
        near = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if near.startswith('..') else near}:{line}"


def rows_of(node: PlanNode, name: str) -> list[Row]:
    """The stages of a verified plan, in execution order. ``name``: ``"Photos.__getitem__"``."""
    if isinstance(node, SliceNode):
        return _of_container(node, name)
    if not isinstance(node, CutNode):
        return [Row(name, "the whole sample", True, SAME)]
    rows: list[Row] = []
    code, line = _first_cut(node)
    if code is not None and is_users_code(code):
        inside = bool(node.inner)
        text = " ".join(linecache.getline(code.co_filename, line).split())
        text = text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
        begin = place_of(code.co_filename, code.co_firstlineno)
        rows.append(Row(begin, getattr(code, "co_qualname", code.co_name), True, f"{SAME} up to line {line}"))
        rows.append(Row(place_of(code.co_filename, line), text, inside, "in part, see below" if inside else DRAWS))
    for key, inner in node.inner.items():
        rows += rows_of(inner, key.partition("[")[0].rpartition(":")[2].rpartition(".")[2])
    return rows


def _of_container(node: SliceNode, name: str) -> list[Row]:
    rows = []
    for k, item in enumerate(node.names):
        in_part = k == node.kept and node.inner is not None
        why = SAME if k < node.kept else "in part, see below" if in_part else DRAWS if k == node.kept else LATER
        rows.append(Row(name, item, k < node.kept or in_part, why))
        if in_part and node.inner is not None:
            rows += rows_of(node.inner, item)
    return rows


def cut_of(node: PlanNode) -> str:
    """File and line of the innermost user statement that runs each time; "" if there is none."""
    if isinstance(node, SliceNode):
        return "" if node.inner is None else cut_of(node.inner)
    if not isinstance(node, CutNode):
        return ""
    found = next(filter(None, map(cut_of, node.inner.values())), "")
    code, line = _first_cut(node)
    return found or ("" if code is None or not is_users_code(code) else place_of(code.co_filename, line))


def _first_cut(node: CutNode) -> tuple[types.CodeType | None, int]:
    """The first function that this node has cut in this process, and the line; None and 0 if there is none."""
    for fn, parts in node.rewritten.values():
        return fn.__code__, parts.line
    return None, 0
