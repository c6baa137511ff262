"""``reference/commands.md``: every command with its options, from the objects that parse them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from stoker.commands.main import COMMANDS, stoker

from . import Uncovered, code, table, title

HOW_TO = {
    "run": "../doctor.md",
    "bench": "../bench.md",
    "tune": "../tune.md",
    "batch-size": "../batch-size.md",
    "compare": "../compare.md",
    "stats": "../stats.md",
    "cache": "../staging.md",
    "verify": "../faults.md",
    "why": "../why.md",
    "explain": "../symptoms/index.md",
}


def page() -> dict[str, str]:
    """The page; raises ``Uncovered`` for a command without an example or an option without help."""
    lines = [
        "# Commands",
        "",
        "Exit codes: 0 it worked, 1 it failed, 2 wrong usage. `stoker run` returns the script's own exit code.",
        "",
    ]
    rows = [[f"[`stoker {name}`](#stoker-{name})", words] for name, words in COMMANDS.items()]
    lines += [table(["command", ""], rows)]
    root = click.Context(stoker, info_name="stoker")
    for name in COMMANDS:
        command = stoker.get_command(root, name)
        assert command is not None
        lines += _command(command, click.Context(command, info_name=name, parent=root), HOW_TO.get(name))
    return {"reference/commands.md": "\n".join(lines)}


def _command(command: click.Command, context: click.Context, how_to: str | None = None) -> Iterator[str]:
    path = context.command_path
    text, _, examples = inspect.cleandoc(command.help or "").partition("\b\n")
    if not examples.lstrip().startswith("Example"):
        raise Uncovered(f"{path} --help has no examples")
    depth = "#" * (2 + path.count(" ") - 1)
    yield f"{depth} {path} {{ #{path.replace(' ', '-')} }}\n"
    yield re.sub(r"(?<![\w-])(--[a-z][\w-]*|\$[A-Z_]+[\w/.-]*[\w/])", r"`\1`", text.strip()) + "\n"
    if how_to:
        yield f"[{title(how_to)}]({how_to})\n"
    yield f"    {path} {' '.join(command.collect_usage_pieces(context))}\n"
    rows = []
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if isinstance(param, click.Option) and record is not None:
            if not record[1]:
                raise Uncovered(f"{path} {record[0]} has no help")
            if "--help" not in param.opts:
                rows.append([code(record[0]), record[1].replace("[", r"\[").replace("<", "&lt;")])
    if rows:
        yield table(["option", ""], rows)
    yield "```console\n" + inspect.cleandoc(examples.split("\n", 1)[1]) + "\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            sub = command.get_command(context, name)
            assert sub is not None
            yield from _command(sub, click.Context(sub, info_name=name, parent=context))
