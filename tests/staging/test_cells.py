"""Datasets that are defined in cells: IPython compiles each statement by itself, and the source is in linecache only."""

from __future__ import annotations

import ast
import linecache
from typing import Any

import pytest

import stoker
from stoker.staging.source import NoSource, tree_of

CELL = """\
import random
import torch

class Own(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, i):
        x = torch.full((40, 40), float(i)).cumsum(0)
        return x + random.random()
"""


def run(source: str, name: str, shown: str | None = None) -> dict[str, Any]:
    """The names that a cell defines."""
    lines = (source if shown is None else shown).splitlines(keepends=True)
    linecache.cache[name] = len(source), None, lines, name
    names: dict[str, Any] = {}
    for statement in ast.parse(source, name).body:
        exec(compile(ast.Module([statement], []), name, "exec"), names)
    return names


@pytest.mark.parametrize("name", ["<ipython-input-1-abc>", "/tmp/ipykernel_1/23.py"])
def test_the_deterministic_part_is_found(name: str) -> None:
    split = stoker.split(run(CELL, name)["Own"]())
    assert f"{name}:7  Own.__getitem__             the same each time up to line 9" in str(split)


def test_other_source_than_what_runs_is_none() -> None:
    own = run(CELL, "/tmp/ipykernel_1/24.py", CELL.replace("float(i)", "float(i + 1)"))["Own"]
    with pytest.raises(NoSource, match="differs from the code that runs"):
        tree_of(own.__getitem__)
