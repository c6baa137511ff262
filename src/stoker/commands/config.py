"""``[tool.stoker]`` in a pyproject.toml: defaults for options of ``stoker run``. The command line wins.

The file is the nearest with such a table: in the script's folder or a parent of it. For a module or another command, it
is searched for from the current folder.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ..core.errors import UsageError
from . import arguments
from .script import is_script

FILE, TABLE = "pyproject.toml", "[tool.stoker]"
IS_THERE = re.compile(r"(?m)^\s*\[\s*tool\s*\.\s*stoker\s*[].]")
NO_KEYS = ("apply", "debug", "max-steps", "m", "help")  # they change the run itself, so they are typed
NEEDS = {  # a default counts only in a run that has this option, too
    "keep": "apply",
    "on-mismatch": "apply",
    "workers-on": "apply",
    "gpus": "gpu-price",
    "cpu-price": "gpu-price",
    "fail-above": "fail-on",
}


class Configured(arguments.Command):
    """A command whose options have defaults in a file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        words = given.get("command")
        words = words if isinstance(words, tuple) else ()
        asks = ctx.resilient_parsing or {*args[: len(args) - len(words)]} & {*ctx.help_option_names}
        path = None if asks or not words else _file(words, bool(given.get("module")))
        if path is None:
            return super().parse_args(ctx, args)
        options = {max(p.opts, key=len).lstrip("-"): p for p in self.params if isinstance(p, click.Option)}
        keys = {name: p for name, p in options.items() if name not in NO_KEYS}
        found = _read(path, keys)
        here = {*found, *(name for name, p in options.items() if p.name in given)}
        used = {key: value for key, value in found.items() if key not in NEEDS or NEEDS[key] in here}
        ctx.default_map = {str(keys[key].name): value for key, value in used.items()}
        try:
            return super().parse_args(ctx, args)
        except (click.BadParameter, UsageError) as e:
            text = e.format_message() if isinstance(e, click.BadParameter) else str(e)
            if any(f"--{key}" in text for key in used if keys[key].name not in given):
                raise UsageError(f"{path}: {TABLE}: {text.rstrip('.')}") from None
            raise


def _file(command: Sequence[str], module: bool) -> Path | None:
    """Returns the nearest file with the table."""
    script = Path(command[0])
    folder = script.parent.resolve() if is_script(script) and not module else Path.cwd()
    for path in (parent / FILE for parent in (folder, *folder.parents)):
        try:
            if path.is_file() and IS_THERE.search(path.read_text("utf-8", errors="replace")):
                return path if _may_be_read(path, folder) else None
        except OSError:
            continue
    return None


def _may_be_read(path: Path, folder: Path) -> bool:
    """Returns whether the file can be parsed here, and is not of another user, who could name files to overwrite.
    The owner of the script's folder owns the script, too."""
    if path.stat().st_uid not in (0, os.geteuid(), folder.stat().st_uid):
        sys.stderr.write(f"stoker: {path} is ignored: it belongs to another user\n")
        return False
    if sys.version_info < (3, 11):
        sys.stderr.write(f"stoker: {TABLE} of {path} is ignored: reading it needs Python 3.11\n")
        return False
    return True


def _read(path: Path, keys: dict[str, click.Option]) -> dict[str, object]:
    """Returns the table, as values that the command line could have. Raises UsageError if the file is not TOML, a key
    is unknown, or a value has the wrong type."""
    import tomllib

    try:
        table: dict[str, object] = tomllib.loads(path.read_text("utf-8"))["tool"]["stoker"]
    except ValueError as e:
        raise UsageError(f"{path} is not TOML: {e}") from None
    for key in table.keys() - keys.keys():
        close = difflib.get_close_matches(key, keys, 1)
        instead = f"did you mean {close[0]}?" if close else f"it may have {', '.join(sorted(keys))}"
        raise UsageError(f"{path}: {TABLE} has the unknown key {key!r}; {instead}")
    return {key: _value(path, key, value, keys[key]) for key, value in table.items()}


def _value(path: Path, key: str, value: object, option: click.Option) -> object:
    if option.multiple:
        values = value if isinstance(value, list) else [value]
        if all(isinstance(each, str) for each in values):
            return values
    elif option.is_flag and isinstance(value, bool):
        return value
    elif not option.is_flag and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    what = "true or false" if option.is_flag else "a string or a number"
    raise UsageError(f"{path}: {TABLE}: {key} must be {what}, not {value!r}")
