"""``stoker cache``: fills, lists, checks and removes caches on disk; the work is done in ``staging``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from ..core import output, terminal
from ..core.errors import StokerError, UsageError
from ..core.progress import Progress
from ..core.terminal import counted, human_bytes, printable
from ..core.types import JsonObject
from . import arguments

if TYPE_CHECKING:
    from ..staging.prefill import Build
    from ..staging.store.manage import Cache, Pruned, Verified

F = TypeVar("F", bound=Callable[..., object])

SCHEMA = 1
DAY_S = 86_400.0
SHOWN = 10  # samples that are named
SHORT_KEY = 6  # characters of a cache's key, at least; more where two names would be the same


@click.group("cache", no_args_is_help=False)
def command() -> None:
    """Fill, list, check and remove caches on disk.

    Caches are in $STOKER_CACHE, else in stoker/staged in the user's cache folder; --dir names another folder. NAME is a
    cache's name as ls shows it, or its beginning.

    \b
    Examples:
      stoker cache build train.py:train_set --num-workers 8    before the job that has the GPU
      stoker cache ls
      stoker cache verify && python train.py
      stoker cache prune --older-than 30 --dry-run
    """


def _folder(subcommand: F) -> F:
    return click.option("--dir", "folder", type=arguments.FILE, metavar="DIR", help="Folder of the caches.")(subcommand)


def _base(folder: Path | None) -> Path:
    from ..staging.store.folder import root  # which loads torch

    return Path(folder or root()).absolute()


def _print_error(text: str) -> None:
    print(f"stoker: {text}", file=sys.stderr)


def _give(json_path: Path | None, result: JsonObject, text: str) -> None:
    output.give({"schema": SCHEMA, **result}, json_path, lambda: print(text))


@command.command("build")
@arguments.target
@arguments.num_workers
@click.option(
    "--budget", metavar="SIZE", help="Space on the disk for samples, as 200GB.  [default: half of what is free]"
)
@_folder
@arguments.json_file
def build_command(
    target: str, num_workers: int | str, budget: str | None, folder: Path | None, json_path: Path | None
) -> int:
    """Prepare all samples of a dataset, once.

    TARGET is a stoker.Staged, a Dataset, a DataLoader, or a function that returns one: path.py:name or
    package.module:name. A dataset that is not staged is split by itself: the script then finds the cache with
    stoker.Staged(dataset, cache="disk"). Samples that cannot be read are listed. An interrupted build continues where
    it was. Exit code 1: not all samples are cached.

    \b
    Examples:
      stoker cache build train.py:train_set
      stoker cache build train.py:make_loader --num-workers 8 --budget 200GB --dir /scratch/me
    """
    from ..loader.variant import as_loader, find  # which loads torch

    dataset = as_loader(find(target), name=target).dataset
    from ..staging.prefill import Build

    build = None
    try:
        with Progress(target, doing="filling") as progress:
            build = Build(dataset, None if folder is None else folder.absolute(), budget)
            for note in build.notes:
                _print_error(note)
            build.run(num_workers, lambda b: progress.samples(b.done, b.samples, len(b.failed), b.before))
    except KeyboardInterrupt:
        if build is not None:
            _print_error(_unfinished(build))
        raise
    except StokerError as e:
        if build is not None and not isinstance(e, UsageError):
            _print_error(f"{e}; {_unfinished(build)}")
            return 1
        return arguments.fail(e)
    _give(json_path, build.as_dict(), _built(build))
    if build.problem:
        _print_error(build.problem)
    return 0 if build.filled == build.samples and not build.problem else 1


def _unfinished(build: Build) -> str:
    return f"{build.filled:,} of {build.samples:,} samples cached in {build.path}; rerun to continue"


def _built(build: Build) -> str:
    from ..staging.store.manage import nbytes_of

    lines = []
    if build.failed:
        lines.append(f"{counted(len(build.failed), 'sample')} failed")
        lines += [f"  {f.sample}: {printable(f.error)}" for f in build.failed[:SHOWN]]
    if len(build.failed) > SHOWN:
        lines.append(f"  ... and {len(build.failed) - SHOWN:,} more")
    if build.filled > build.before:
        rate = f", {build.rate:,.0f} samples/s"
    else:
        rate = ", nothing to do" if build.filled == build.samples else ""
    size = human_bytes(nbytes_of(build.path))
    lines.append(f"{build.filled:,} of {build.samples:,} samples cached, {size}{rate}: {build.path}")
    return "\n".join(lines)


@command.command("ls")
@_folder
@arguments.json_file
def ls_command(folder: Path | None, json_path: Path | None) -> int:
    """List all caches. What a cache depends on is in its manifest.json.

    \b
    Example:
      stoker cache ls --json - | jq '.caches[] | select(.state != "complete").path'
    """
    from ..staging.store.manage import listed

    base = _base(folder)
    caches = listed(base)
    _give(json_path, {"dir": str(base), "caches": [c.as_dict() for c in caches]}, _listed(base, caches))
    return 0


def _listed(base: Path, caches: Sequence[Cache]) -> str:
    if not caches:
        return f"no caches in {base}"
    names = _short_names([c.path.name for c in caches])
    rows = []
    for name, c in zip(names, caches, strict=True):
        samples = f"{c.samples:,}" if c.state == "complete" else f"{c.filled:,}/{c.samples:,}"
        rows.append((name, samples, f"{int(100 * c.share)}%", human_bytes(c.nbytes), printable(c.made)[:10], c.state))
    table = terminal.table(("cache", "samples", "in", "on disk", "made", "state"), rows, terminal.width(sys.stdout))
    total = human_bytes(sum(c.nbytes for c in caches))
    reasons = [f"{name}: {printable(c.reason)}" for name, c in zip(names, caches, strict=True) if c.reason]
    return "\n".join([table, *reasons, "", f"{counted(len(caches), 'cache')}, {total}, in {base}"])


def _short_names(names: Sequence[str]) -> list[str]:
    """Each name as short as it is still unique."""
    out = []
    for name in names:
        n = name.rindex("-") + 1 + SHORT_KEY
        while n < len(name) and sum(other.startswith(name[:n]) for other in names) > 1:
            n += 1
        out.append(name[:n])
    return out


@command.command("verify")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@_folder
@arguments.json_file
def verify_command(names: tuple[str, ...], folder: Path | None, json_path: Path | None) -> int:
    """Read all samples of the named caches, or of all, and compare their checksums.

    Exit code 1: something was damaged; the next run makes it anew.

    \b
    Examples:
      stoker cache verify
      stoker cache verify ImageFolder-3f --json verify.json
    """
    from ..staging.store import manage

    base = _base(folder)
    paths = [manage.find(base, name) for name in names] or [c.path for c in manage.listed(base)]
    found = []
    for path in dict.fromkeys(paths):
        with Progress(path.name, doing="checking") as progress:
            found.append(manage.verify(path, progress.samples))
    text = "\n".join(map(_verified, found)) or f"no caches in {base}"
    _give(json_path, {"dir": str(base), "caches": [v.as_dict() for v in found]}, text)
    return int(any(v.damaged or v.error for v in found))


def _verified(v: Verified) -> str:
    name = v.cache.name
    if v.error:
        return f"{name}: damaged: {printable(v.error)}" + ": the next run makes it anew" * v.mended
    if not v.damaged:
        if v.cache.state == "refused":
            return f"{name}: nothing in it is used: {printable(v.cache.reason)}"
        return f"{name}: {counted(v.checked, 'sample')}, all intact"
    which = ", ".join(map(str, v.damaged[:SHOWN])) + ", ..." * (len(v.damaged) > SHOWN)
    then = "removed, the next run makes them anew" if v.mended else "not served; the folder is read-only"
    return f"{name}: {len(v.damaged):,} of {counted(v.checked, 'sample')} damaged: {which}: {then}"


@command.command("prune")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--older-than", type=click.FloatRange(0, 1e6), metavar="DAYS", help="Those that no run has opened for DAYS."
)
@click.option("--unused", is_flag=True, help="Those whose source files are gone or changed.")
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@_folder
@arguments.json_file
def prune_command(
    names: tuple[str, ...],
    older_than: float | None,
    unused: bool,
    everything: bool,
    dry_run: bool,
    folder: Path | None,
    json_path: Path | None,
) -> int:
    """Remove caches: those for which all given conditions hold. A run that has a cache open continues with it.

    \b
    Examples:
      stoker cache prune ImageFolder-3f
      stoker cache prune --unused --dry-run
      stoker cache prune --older-than 30 --unused     those that are both
    """
    if not (names or older_than is not None or unused or everything):
        raise UsageError("say what to remove: NAME, --older-than DAYS, --unused or --all")
    if names and everything:
        raise UsageError("NAME or --all, not both")
    from ..staging.store import manage

    base = _base(folder)
    found = manage.prune(base, names, None if older_than is None else older_than * DAY_S, unused, dry_run)
    _give(json_path, {"dir": str(base), "dry_run": dry_run, **found.as_dict()}, _pruned(found, base, dry_run))
    for cache in found.left:
        _print_error(f"{cache.path} cannot be removed: check that you may write to {base}")
    return int(bool(found.left))


def _pruned(found: Pruned, base: Path, dry_run: bool) -> str:
    if not found.removed and not found.nbytes:
        return f"nothing to remove in {base}"
    lines = [f"{c.name}: {human_bytes(c.nbytes)}, {c.state}" for c in found.removed]
    return "\n".join([*lines, f"{human_bytes(found.nbytes)} {'would be freed' if dry_run else 'freed'}"])
