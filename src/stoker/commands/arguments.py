"""Options that several commands share. click names a wrong value in one sentence, and the exit code is 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from ..core import output

F = TypeVar("F", bound=Callable[..., object])

FILE = click.Path(path_type=Path)
COUNT = click.IntRange(min=1)
SECONDS = click.FloatRange(min=0, max=1e6, min_open=True)


def workers(text: str) -> int | str:
    """A number of worker processes, or "auto"."""
    if text == "auto":
        return text
    if not text.isdecimal():
        raise click.BadParameter(f"{text!r} is not a number of workers: 0, 1, ... or auto")
    return int(text)


def _check_json(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    output.check(path)
    return path


def target(command: F) -> F:
    """The argument TARGET, which ``loader.variant.find`` imports."""
    return click.argument("target", metavar="TARGET")(command)


def json_file(command: F) -> F:
    """``--json FILE``; that the file can be written is checked before the command begins."""
    help_text = "Write the result as JSON; - is stdout, in place of the text."
    return click.option("--json", "json_path", type=FILE, metavar="FILE", callback=_check_json, help=help_text)(command)


def time_limit(default: float) -> Callable[[F], F]:
    """``--time-limit SECONDS``."""
    help_text = "End after that many seconds with what is known by then."
    return click.option(
        "--time-limit", type=SECONDS, default=default, show_default=True, metavar="SECONDS", help=help_text
    )


def num_workers(command: F) -> F:
    """``--num-workers N|auto`` of a command that reads a whole dataset."""
    help_text = "Worker processes; 0 reads in the command's own process."
    return click.option(
        "--num-workers", type=workers, default="auto", show_default=True, metavar="N|auto", help=help_text
    )(command)
