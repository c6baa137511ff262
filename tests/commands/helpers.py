"""What tests of ``stoker run`` share: a training script, the command on it, and the report that it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from stoker.commands import main

TRAIN = """
    import sys, os, time, random
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Data(Dataset):
        def __len__(self):
            return 80
        def __getitem__(self, i):
            time.sleep({nap})
            return torch.full((4,), float(i)), i

    if __name__ == "__main__":
        torch.manual_seed(0)
        loader = DataLoader(Data(), batch_size=4, shuffle=True, num_workers={workers})   # LINE
        for epoch in range(2):
            for x, y in loader:
                time.sleep({step})
                {extra}
            print("epoch", epoch, y.tolist(), sys.argv[1:])
"""


def script(tmp_path: Path, body: str = TRAIN, name: str = "train.py", **kw: Any) -> Path:
    path = tmp_path / name
    settings = {"nap": 0.0, "workers": 1, "step": 0.0, "extra": "pass", **kw}
    text = textwrap.dedent(body)
    path.write_text(text.format(**settings) if body is TRAIN else text)
    return path


def stoker(tmp_path: Path, *args: str | Path, **kw: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "stoker", "run", *map(str, args)]
    kw = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kw}
    return subprocess.run(line, cwd=tmp_path, text=True, timeout=120, **kw)


def importable(tmp_path: Path, patch: pytest.MonkeyPatch, source: str) -> Iterator[str]:
    """A file that commands are given as TARGET, and import under a name that no other test has."""
    name = f"script_{tmp_path.name.replace('-', '_')}"
    patch.setattr(sys, "path", list(sys.path))
    yield str(script(tmp_path, source, f"{name}.py"))
    sys.modules.pop(name, None)


def report(tmp_path: Path, name: str = "stoker-report.json") -> dict[str, Any]:
    return json.loads((tmp_path / name).read_text())  # type: ignore[no-any-return]


def help_texts(columns: int = 80) -> Iterator[tuple[str, str]]:
    """Each command, groups and what is in them included, and its help."""
    todo: list[tuple[click.Command, str, click.Context | None]] = [(main.stoker, "stoker", None)]
    while todo:
        command, name, parent = todo.pop(0)
        context = click.Context(command, info_name=name, parent=parent, terminal_width=columns)
        yield context.command_path, command.get_help(context)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                sub = command.get_command(context, name)
                assert sub is not None
                todo.append((sub, name, context))
