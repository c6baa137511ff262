"""``stoker cache``: lists and removes caches on disk."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core import output, terminal
from ..core.errors import UsageError
from ..core.terminal import counted, human_bytes
from . import arguments

if TYPE_CHECKING:
    from ..staging.store.manage import CacheFolder

SCHEMA = 3
DAY_S = 86_400.0
_folder = click.option("--dir", "folder", type=arguments.FILE, metavar="DIR", help="Directory of the caches.")


@click.group("cache", cls=arguments.CommandGroup, no_args_is_help=False)
def command() -> None:
    """List and remove caches on disk.

    Caches are in $STOKER_CACHE, else in stoker/staged in the user's cache folder; --dir names another folder. NAME is a
    cache's name as ls shows it, or its beginning.

    \b
    Examples:
      stoker cache ls                     name, samples, size, last use, state
      stoker cache prune --older-than 30  remove those that nothing has used for 30 days
    """


def _base(folder: Path | None) -> Path:
    from ..staging.store.folder import root  # imports torch

    return Path(folder or root()).absolute()


@command.command("ls")
@_folder
@arguments.json_file
def ls_command(folder: Path | None, json_path: Path | None) -> int:
    """List all caches. What a cache depends on is in its manifest.json.

    \b
    Examples:
      stoker cache ls
      stoker cache ls --json - | jq '.caches[] | select(.state != "complete").path'
    """
    from ..staging.store.manage import listed

    base = _base(folder)
    caches = listed(base)
    found = [{**c._asdict(), "path": str(c.path), "used": _date(c)} for c in caches]
    output.give({"schema": SCHEMA, "dir": str(base), "caches": found}, json_path, lambda: print(_listed(base, caches)))
    return 0


def _date(cache: CacheFolder) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(cache.used))


def _listed(base: Path, caches: Sequence[CacheFolder]) -> str:
    if not caches:
        return f"no caches in {base}"
    rows = [(c.path.name, f"{c.samples:,}", human_bytes(c.nbytes), _date(c), c.state) for c in caches]
    text = terminal.table(("cache", "samples", "on disk", "used", "state"), rows, terminal.width(sys.stdout))
    total = human_bytes(sum(c.nbytes for c in caches))
    return f"{text}\n\n{counted(len(caches), 'cache')}, {total}, in {base}"


@command.command("prune")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--older-than", type=click.FloatRange(0, 1e6), metavar="DAYS", help="Remove caches not opened for DAYS days."
)
@click.option("--all", "everything", is_flag=True, help="Remove all caches.")
@_folder
def prune_command(names: tuple[str, ...], older_than: float | None, everything: bool, folder: Path | None) -> int:
    """Remove caches: those named, of them or of all those not used for a time. A run that has one open goes on with it.

    \b
    Examples:
      stoker cache prune ImageFolder
      stoker cache prune --older-than 30
    """
    if bool(names) == everything and (names or older_than is None):
        raise UsageError("choose what to remove: NAME, --older-than DAYS or --all. NAME and --all exclude each other")
    from ..staging.store import manage

    base = _base(folder)
    every = manage.listed(base)
    chosen = list(dict.fromkeys(manage.find(every, name) for name in names)) or every
    if older_than is not None:
        chosen = [c for c in chosen if c.used < time.time() - older_than * DAY_S]
    left = manage.remove(base, chosen)
    for cache in chosen:
        if cache in left:
            print(f"stoker: cannot remove {cache.path}: check that you have write access to {base}", file=sys.stderr)
        else:
            print(f"{cache.path.name}: {human_bytes(cache.nbytes)} freed")
    if not chosen:
        print(f"nothing to remove in {base}")
    return int(bool(left))
