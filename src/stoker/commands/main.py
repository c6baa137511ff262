"""The command ``stoker``. Exit codes: 0 success, 1 failure, 2 wrong usage; ``run`` returns the script's own."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

import click
from click.shell_completion import get_completion_class, shell_complete

from ..core.errors import StokerError, UsageError
from ..core.version import __version__
from . import arguments

# What `stoker --help` says about each command. Its module, of the same name, is imported only when needed.
FIRST = {
    "run": "Run a script and report what its data loaders did; --apply speeds it up.",
    "check": "Show which cores, memory and GPUs this machine really grants.",
    "explain": "Answer a question about data loading, or explain a cause that stoker run names.",
}
MORE = {
    "bench": "Measure how fast a data loader is, without a model.",
    "tune": "Find a data loader's best settings by measuring.",
    "batch-size": "Find the largest batch that fits the accelerator.",
    "compare": "Compare two reports, for example before and after a change.",
    "stats": "Compute the mean and std of an image dataset.",
    "cache": "List and remove caches on disk.",
    "verify": "Read a whole dataset and list the broken samples.",
    "why": "Show why a running job hangs.",
}
COMMANDS = {**FIRST, **MORE}
COMPLETE = "_STOKER_COMPLETE"  # set by the code that --print-completion prints
WELCOME = """\
stoker finds what a PyTorch training script waits for when it loads data, and makes it faster.

  My script is slow          stoker run train.py
  It hangs                   stoker why PID
  How many workers?          stoker tune train.py:make_loader
  Another question           stoker explain "gpu is at 30 percent"

All commands: stoker --help
"""


class _Commands(arguments.CommandGroup):
    """A group whose commands are modules of this package, each of which defines ``command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f".{name.replace('-', '_')}", __package__).command
        return command

    def instead(self, ctx: click.Context, args: list[str]) -> str:
        if args[0].endswith((".py", ".ipynb")) or os.path.isfile(args[0]):
            return f"did you mean: stoker run {shlex.join(args)}"
        return super().instead(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Commands first, then the two options."""
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        wide = max(map(len, COMMANDS))
        for title, commands in (("Commands", FIRST), ("More", MORE)):
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{wide}}", about) for name, about in commands.items()])


def _print_completion(ctx: click.Context, param: click.Parameter, shell: str | None) -> None:
    found = get_completion_class(shell) if shell else None
    if found is not None:
        click.echo(found(stoker, {}, "stoker", COMPLETE).source())
        ctx.exit()


@click.group(cls=_Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", message="stoker %(version)s")
@click.option(
    "--print-completion",
    type=click.Choice(["bash", "zsh", "fish"]),
    metavar="SHELL",
    is_eager=True,
    expose_value=False,
    callback=_print_completion,
    help="Print the code that makes bash, zsh or fish complete commands and options.",
)
def stoker() -> None:
    """Keeps the accelerator fed: finds what starves it, and fixes it.

    \b
    Examples:
      stoker run train.py             observe a training script
      stoker run --apply train.py     the same, sped up
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (without the program's name) and returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if COMPLETE in os.environ:  # a shell asks for what could come next
        return shell_complete(stoker, {}, "stoker", COMPLETE, os.environ[COMPLETE])
    if not args:
        sys.stderr.write(WELCOME)
        return 2
    try:
        # Not stoker.main(), which would turn a loader's EOFError into "aborted".
        with stoker.make_context("stoker", args) as context:
            return int(stoker.invoke(context) or 0)
    except click.exceptions.Exit as e:
        return e.exit_code
    except (click.ClickException, StokerError) as e:
        sys.stderr.write(f"stoker: {_message(e)}\n")
        return 2 if isinstance(e, (click.ClickException, UsageError)) else 1
    except KeyboardInterrupt:
        sys.stderr.write("stoker: interrupted\n")
        return 130
    except BrokenPipeError:  # ... | head
        sys.stderr.close()
        return 1


def _message(e: click.ClickException | StokerError) -> str:
    """Returns one sentence. For wrong usage, it ends with what to type or to read instead."""
    if isinstance(e, StokerError):
        return str(e)
    path = e.ctx.command_path if isinstance(e, click.UsageError) and e.ctx is not None else "stoker"
    if isinstance(e, click.NoSuchOption):
        instead = f"did you mean {e.possibilities[0]}?" if e.possibilities else f"see {path} --help"
        return f"{path} has no option {e.option_name}; {instead}"
    return f"{e.format_message().rstrip('.')}; see {path} --help"
