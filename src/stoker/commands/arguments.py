"""Options that several commands share. For a wrong value click prints one sentence, and the exit code is 2."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import shlex
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from ..core import output
from ..core.errors import UsageError

FILE = click.Path(path_type=Path)
COUNT = click.IntRange(min=1)
SECONDS = click.FloatRange(min=0, max=1e6, min_open=True)


class Command(click.Command):
    """A command whose docstring ends with examples, which its help shows last."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(self._parts()[0])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        examples = self._parts()[1]
        if examples:
            with formatter.section("Examples"):
                formatter.write_text(f"\b\n{inspect.cleandoc(examples)}")

    def _parts(self) -> tuple[str, str]:
        text, _, examples = inspect.cleandoc(self.help or "").partition("\b\nExamples:\n")
        return text.strip(), examples


class CommandGroup(Command, click.Group):
    """The same for a group, whose commands are ``Command``s as well."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise UsageError(f"there is no command {args[0]!r}; {self.instead(ctx, args)}")
        return super().resolve_command(ctx, args)

    def instead(self, ctx: click.Context, args: list[str]) -> str:
        """Returns what to type instead of a command that does not exist."""
        close = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
        if close:
            return f"did you mean: {ctx.command_path} {shlex.join([*close, *args[1:]])}"
        return f"see {ctx.command_path} --help"


command = functools.partial(click.command, cls=Command)


def workers(text: str) -> int | str:
    """Parses a number of worker processes, or "auto"."""
    if text == "auto":
        return text
    if not text.isdecimal():
        raise click.BadParameter(f"{text!r} is not a number of workers: 0, 1, ... or auto")
    return int(text)


def address(text: str) -> tuple[str, int]:
    """Parses ``PORT`` or ``HOST:PORT`` into host and port. Without a host, only this machine can connect.

    Example:
        >>> address("9100"), address("0.0.0.0:0"), address("[::]:9100")
        (('127.0.0.1', 9100), ('0.0.0.0', 0), ('::', 9100))
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is not a PORT or HOST:PORT with a port from 0 to 65535")
    return host.strip("[]") or "127.0.0.1", int(port)


def price(text: str) -> float:
    """Parses a price per hour, which must be more than 0."""
    value = _number(text)
    if not 0 < value <= 1e6:  # also rejects nan
        raise click.BadParameter(f"{text!r} is not an hourly price such as 2.10")
    return value


def loss(text: str) -> float:
    """Parses a share from 0 to less than 1, written as ``5%`` or ``0.05``."""
    value = _number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise click.BadParameter(f"{text!r} is not a share such as 5% or 0.05")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _check_json(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    output.check(path)
    return path


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes an argument to the name of a file, although it may be something else."""
    return [CompletionItem(incomplete, type="file")]


target = click.argument("target", metavar="TARGET", shell_complete=files)  # see ``loader.variant.find``
json_file = click.option(  # checked before the command begins
    "--json",
    "json_path",
    type=FILE,
    metavar="FILE",
    callback=_check_json,
    help="Write the result as JSON; - writes it to stdout instead of the text.",
)
num_workers = click.option(  # of a command that reads a whole dataset
    "--num-workers",
    type=workers,
    default="auto",
    show_default=True,
    metavar="N|auto",
    help="Number of worker processes; 0 reads in the command's own process.",
)
time_limit = functools.partial(
    click.option,
    "--time-limit",
    type=SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Stop after this many seconds and report what was measured so far.",
)
