"""``stoker cache``: what the command line does with caches on disk; ``staging.build`` and ``cache.manage`` do it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import output
from ..core.errors import StokerError, UsageError
from ..core.progress import QUIET_S, Progress
from ..core.terminal import human_seconds
from . import cache_text
from .arguments import days, workers

SCHEMA = 1
DAY_S = 86_400.0
TELL_S = 0.1  # between two words of progress
EXAMPLE = """examples:
  stoker cache build train.py:train_set --workers 8    before the job that has the GPU
  stoker cache ls
  stoker cache verify && python train.py
  stoker cache prune --older-than 30 --dry-run

Caches lie in $STOKER_CACHE, else in stoker/staged among the user's caches; --dir names another folder.
NAME is a cache's name as ls shows it, or how it begins."""
BUILD_EXAMPLE = """examples:
  stoker cache build train.py:train_set
  stoker cache build train.py:make_loader --workers 8 --budget 200GB --dir /scratch/me

TARGET is a stoker.Staged, a Dataset, a DataLoader, or a function that returns one: path.py:name or
package.module:name. Where it is no Staged it becomes one, and its border is found: python train.py then finds the
cache with stoker.Staged(dataset, cache="disk"). Samples that cannot be read are listed, and the others go on; what is
in stays in, and the next build goes on from there. Exit code 1: not all samples are in."""
LS_EXAMPLE = """example:
  stoker cache ls --json - | jq '.caches[] | select(.state != "complete").path'"""
VERIFY_EXAMPLE = """examples:
  stoker cache verify
  stoker cache verify ImageFolder-3f --json verify.json

Reads all samples and compares their checksums. Exit code 1: something was damaged; the next run makes it anew."""
PRUNE_EXAMPLE = """examples:
  stoker cache prune ImageFolder-3f
  stoker cache prune --unused --dry-run
  stoker cache prune --older-than 30 --unused     those that are both

A run that has a cache open goes on with it."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's arguments."""
    raw = argparse.RawDescriptionHelpFormatter
    cache = commands.add_parser(
        "cache", help="caches on disk: fill one, list, check and remove them", epilog=EXAMPLE, formatter_class=raw
    )
    actions = cache.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, words: str, epilog: str) -> argparse.ArgumentParser:
        p = actions.add_parser(name, help=words, epilog=epilog, formatter_class=raw)
        p.add_argument("--dir", type=Path, metavar="DIR", help="where caches lie")
        p.add_argument("--json", type=Path, metavar="FILE", help="the result as JSON; - is stdout, instead of the text")
        return p

    p = action("build", "prepare all samples of a dataset, once", BUILD_EXAMPLE)
    p.add_argument("target", metavar="TARGET", help="path.py:name or package.module:name")
    p.add_argument("--workers", type=workers, default="auto", metavar="N|auto", help="worker processes; 0 works in "
                   "the command's own (default: auto)")  # fmt: skip
    p.add_argument("--budget", metavar="SIZE", help="what samples may take on the disk, as 200GB (default: half of "
                   "what is free)")  # fmt: skip
    action("ls", "all caches", LS_EXAMPLE)
    p = action("verify", "read all samples and find those that are damaged", VERIFY_EXAMPLE)
    p.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    p = action("prune", "remove caches", PRUNE_EXAMPLE)
    p.add_argument("names", nargs="*", metavar="NAME")
    p.add_argument("--older-than", type=days, metavar="DAYS", help="those that no run has opened for so long")
    p.add_argument("--unused", action="store_true", help="those whose source files are gone or changed")
    p.add_argument("--all", action="store_true", help="all of them")
    p.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns its exit code.

    Raises:
        UsageError: wrong arguments, or a name that is none.
    """
    output.check(options.json)
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "build": _build,
        "ls": _ls,
        "verify": _verify,
        "prune": _prune,
    }
    return actions[options.action](options)


def _base(options: argparse.Namespace) -> Path:
    from ..staging.store.folder import root  # which loads torch

    return Path(options.dir or root()).absolute()


def _give(options: argparse.Namespace, found: dict[str, Any], text: str) -> None:
    """The result, as JSON where that is asked for."""
    output.give({"schema": SCHEMA, **found}, options.json, lambda: print(text))


def _say(words: str) -> None:
    print(f"stoker: {words}", file=sys.stderr)


# -- build


def _build(options: argparse.Namespace) -> int:
    from ..loader.variant import as_loader, find  # which loads torch

    thing = as_loader(find(options.target), name=options.target)
    from ..staging.prefill import Build

    progress, build = _Progress("filling", options.target), None
    try:
        where = None if options.dir is None else options.dir.absolute()
        build = Build(thing.dataset, where, options.budget)
        for note in build.notes:
            _say(note)
        build.run(options.workers, lambda b: progress(cache_text.so_far(b)))
    except KeyboardInterrupt:
        progress.end()
        if build is not None:
            _say(cache_text.stays(build))
        raise
    except UsageError:
        raise
    except StokerError as e:
        progress.end()
        _say(str(e) if build is None else f"{e}; {cache_text.stays(build)}")
        return 1
    finally:
        progress.end()
    _give(options, build.as_dict(), cache_text.built(build))
    if build.problem:
        _say(build.problem)
    return 0 if build.filled == build.samples and not build.problem else 1


class _Progress(Progress):
    """Says what is done where that is no measuring."""

    def __init__(self, doing: str, name: str) -> None:
        super().__init__(name)
        self._doing = doing

    def __call__(self, words: str) -> None:
        if self._live:
            super().__call__(words)
        elif not self._said and time.monotonic() - self._began > QUIET_S:
            self._said = True
            _say(f"{self._doing} {self._name}: {words}")


# -- ls


def _ls(options: argparse.Namespace) -> int:
    from ..staging.store.manage import listed

    base = _base(options)
    caches = listed(base)
    _give(options, {"dir": str(base), "caches": [c.as_dict() for c in caches]}, cache_text.listed(base, caches))
    return 0


# -- verify, prune


def _verify(options: argparse.Namespace) -> int:
    from ..staging.store import manage

    base = _base(options)
    paths = [manage.find(base, name) for name in options.names] or [c.path for c in manage.listed(base)]
    found = []
    for path in dict.fromkeys(paths):
        progress = _Progress("checking", path.name)
        try:
            found.append(manage.verify(path, _Telling(progress, path.name)))
        finally:
            progress.end()
    text = "\n".join(map(cache_text.verified, found)) or f"no caches in {base}"
    _give(options, {"dir": str(base), "caches": [v.as_dict() for v in found]}, text)
    return int(any(v.damaged or v.error for v in found))


class _Telling:
    """Progress of a check, seldom enough to cost nothing."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress, self._name = progress, name
        self._began = self._told = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        now = time.monotonic()
        if now - self._told > TELL_S:
            self._told = now
            left = human_seconds((now - self._began) / done * (of - done))
            self._progress(f"{self._name}: {done:,} of {of:,} samples, about {left} left")


def _prune(options: argparse.Namespace) -> int:
    if not (options.names or options.older_than is not None or options.unused or options.all):
        raise UsageError("prune wants to be told what to remove: NAME, --older-than DAYS, --unused or --all")
    if options.names and options.all:
        raise UsageError("NAME or --all, not both")
    from ..staging.store import manage

    base = _base(options)
    older_s = None if options.older_than is None else options.older_than * DAY_S
    found = manage.prune(base, options.names, older_s, options.unused, options.dry_run)
    _give(
        options,
        {"dir": str(base), "dry_run": options.dry_run, **found.as_dict()},
        cache_text.pruned(found, base, options.dry_run),
    )
    for cache in found.left:
        _say(f"{cache.path} cannot be removed: is {base} yours to write to?")
    return int(bool(found.left))
