"""What tests of ``stoker run`` share: a training script, the command on it, and the report that it wrote."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from stoker.commands import main

LIMIT_S = 120  # fails on a hang, not on a busy machine

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


def forked(
    does: Callable[[], int | None], folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What a fork of this process does in a folder: as a Python of its own, which has imported torch already. It is an
    eighth of the price. Of the process's own affairs, such as signals and tracebacks, it shows nothing."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = multiprocessing.get_context("fork").Process(target=_as_python, args=(does, folder, env, out, err))
        process.start()
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(str(does), LIMIT_S)
        out.seek(0)
        err.seek(0)
        said = out.read().decode(), err.read().decode()
        return subprocess.CompletedProcess((), process.exitcode, *said)


def _as_python(does: Callable[[], int | None], folder: Path, env: Mapping[str, str] | None, out: Any, err: Any) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    warnings.resetwarnings()  # pytest's would keep them to itself
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = _show_warning
    os.chdir(folder)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    torch.set_num_threads(1)  # OpenMP's threads, if there are any, are in the other process
    sys.exit(does())


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def python(path: Path, *args: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A script in a fork of this process."""

    def does() -> None:
        sys.argv = [str(path), *map(str, args)]
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")

    return forked(does, folder or path.parent)


def forked_stoker(
    tmp_path: Path, *args: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``stoker run`` in a fork of this process; the script has a Python of its own."""
    return forked(lambda: main.main(["run", *map(str, args)]), tmp_path, env)


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
