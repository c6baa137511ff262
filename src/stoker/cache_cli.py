"""``stoker cache``: what the command line does with caches on disk; ``staging.build`` and ``cache.manage`` do it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import StokerError, UsageError
from .report.progress import QUIET_S, Progress
from .report.schema import check_writable
from .report.terminal import colour_wanted, human_bytes, human_seconds, style, table, width

if TYPE_CHECKING:
    from .cache.manage import Cache, Info, Pruned, Verified
    from .cache.sources import Sources
    from .staging.build import Build

SCHEMA = 1
SHOWN = 10  # samples, files or arguments that are named
LABEL = 12  # columns
SHORT = 6  # characters of a cache's key, at least; more where two would be called the same
DAY_S = 86_400.0
TELL_S = 0.1  # between two words of progress
EXAMPLE = """examples:
  stoker cache build train.py:train_set --workers 8    before the job that has the GPU
  stoker cache ls
  stoker cache info ImageFolder-3f
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
INFO_EXAMPLE = """example:
  stoker cache info ImageFolder-3f"""
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
    p.add_argument("--workers", type=_workers, default="auto", metavar="N|auto", help="worker processes; 0 works in "
                   "the command's own (default: auto)")  # fmt: skip
    p.add_argument("--budget", metavar="SIZE", help="what samples may take on the disk, as 200GB (default: half of "
                   "what is free)")  # fmt: skip
    action("ls", "all caches", LS_EXAMPLE)
    p = action("info", "one cache in full, and which of its source files changed", INFO_EXAMPLE)
    p.add_argument("name", metavar="NAME")
    p = action("verify", "read all samples and find those that are damaged", VERIFY_EXAMPLE)
    p.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    p = action("prune", "remove caches", PRUNE_EXAMPLE)
    p.add_argument("names", nargs="*", metavar="NAME")
    p.add_argument("--older-than", type=_days, metavar="DAYS", help="those that no run has opened for so long")
    p.add_argument("--unused", action="store_true", help="those whose source files are gone or changed")
    p.add_argument("--all", action="store_true", help="all of them")
    p.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _workers(text: str) -> int | str:
    if text != "auto" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return text if text == "auto" else int(text)


def _days(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days")
    return value


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns its exit code.

    Raises:
        UsageError: wrong arguments, or a name that is none.
    """
    if options.json is not None and str(options.json) != "-":
        check_writable(options.json)
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "build": _build,
        "ls": _ls,
        "info": _info,
        "verify": _verify,
        "prune": _prune,
    }
    return actions[options.action](options)


def _base(options: argparse.Namespace) -> Path:
    from .cache.folder import root  # which loads torch

    return Path(options.dir or root()).absolute()


def _give(options: argparse.Namespace, found: dict[str, Any], text: str) -> None:
    """The result, as JSON where that is asked for."""
    data = json.dumps({"schema": SCHEMA, **found}, indent=2)
    if options.json is not None and str(options.json) != "-":
        options.json.write_text(data + "\n")
    print(data if str(options.json) == "-" else text)


def _say(words: str) -> None:
    print(f"stoker: {words}", file=sys.stderr)


# -- build


def _build(options: argparse.Namespace) -> int:
    from .tuning.target import as_loader, find  # which loads torch

    thing = as_loader(find(options.target), name=options.target)
    from .staging.build import Build

    progress, build = _Progress("filling", options.target), None
    try:
        where = None if options.dir is None else options.dir.absolute()
        build = Build(thing.dataset, where, options.budget)
        for note in build.notes:
            _say(note)
        build.run(options.workers, lambda b: progress(_so_far(b)))
    except KeyboardInterrupt:
        progress.end()
        if build is not None:
            _say(_stays(build))
        raise
    except UsageError:
        raise
    except StokerError as e:
        progress.end()
        _say(str(e) if build is None else f"{e}; {_stays(build)}")
        return 1
    finally:
        progress.end()
    _give(options, build.as_dict(), _built(build))
    if build.problem:
        _say(build.problem)
    return 0 if build.filled == build.samples and not build.problem else 1


def _stays(build: Build) -> str:
    return (
        f"{build.filled:,} of {build.samples:,} samples are in {build.path} and stay; the next build goes on from there"
    )


def _so_far(build: Build) -> str:
    words = f"{build.done:,} of {build.samples:,} samples ({build.done / build.samples:.0%})"
    words += f", {len(build.failed):,} failed" * bool(build.failed)
    if build.rate and build.done < build.samples:
        left = (build.samples - build.done) / build.rate
        words += f", {build.rate:,.0f} samples/s, about {human_seconds(left)} left"
    return words


def _built(build: Build) -> str:
    from .cache.manage import nbytes_of

    lines = []
    if build.failed:
        lines.append(f"{_count(len(build.failed), 'sample')} failed")
        lines += [f"  {f.sample}: {_plain(f.error)}" for f in build.failed[:SHOWN]]
        lines += _more(len(build.failed))
    added = build.filled - build.before
    rate = f", {build.rate:,.0f} samples/s" if added else ", nothing to do" if build.filled == build.samples else ""
    size = human_bytes(nbytes_of(build.path))
    lines.append(f"{build.filled:,} of {build.samples:,} samples in, {size}{rate}: {build.path}")
    return "\n".join(lines)


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


# -- ls, info


def _ls(options: argparse.Namespace) -> int:
    from .cache.manage import listed

    base = _base(options)
    caches = listed(base)
    _give(options, {"dir": str(base), "caches": [c.as_dict() for c in caches]}, _listed(base, caches))
    return 0


def _listed(base: Path, caches: list[Cache]) -> str:
    if not caches:
        return f"no caches in {base}"
    names = _short([c.path.name for c in caches])
    rows = [
        (
            name,
            f"{c.samples:,}" if c.state == "complete" else f"{c.filled:,}/{c.samples:,}",
            f"{int(100 * c.share)}%",
            human_bytes(c.nbytes),
            _plain(c.made)[:10],
            c.state,
        )
        for name, c in zip(names, caches, strict=True)
    ]
    text = table(("cache", "samples", "in", "on disk", "made", "state"), rows, width(sys.stdout))
    total = human_bytes(sum(c.nbytes for c in caches))
    return f"{text}\n\n{_count(len(caches), 'cache')}, {total}, in {base}"


def _short(names: list[str]) -> list[str]:
    """Names as short as they still are one cache's."""
    out = []
    for name in names:
        n = name.rindex("-") + 1 + SHORT
        while n < len(name) and sum(other.startswith(name[:n]) for other in names) > 1:
            n += 1
        out.append(name[:n])
    return out


def _info(options: argparse.Namespace) -> int:
    from .cache import manage

    found = manage.info(manage.find(_base(options), options.name))
    _give(options, found.as_dict(), _in_full(found))
    return 0


def _in_full(i: Info) -> str:
    c = i.cache
    used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(c.used))
    rows = [
        ("cache", c.name),
        ("in", str(c.path)),
        ("state", f"{c.state}: {c.reason}" if c.reason else c.state),
        ("samples", f"{c.filled:,} of {c.samples:,} ({int(100 * c.share)}%)"),
        ("on disk", f"{human_bytes(c.nbytes)} in {_count(len(i.files), 'file')}; a budget of {human_bytes(c.budget)}"),
        ("made", f"{c.made}, last used {used}"),
    ]
    if i.make:
        rows.append(("a sample", i.make))
        rows.append(("lie in", f"rows, {i.rows:,} of them fit" + f"; others take {human_bytes(i.heap)}" * bool(i.heap)))
    elif c.filled and c.state != "refused":
        rows.append(("lie in", f"one heap, {human_bytes(i.heap)}: their makes or sizes differ"))
    rows += _key(i.key)
    rows += _sources(i.sources)
    colour, columns = colour_wanted(sys.stdout), width(sys.stdout)
    lines, before = [], ""
    for label, words in rows:
        wrapped = textwrap.wrap(
            _plain(words), max(20, columns - LABEL), break_long_words=False, break_on_hyphens=False
        ) or [""]
        lines.append(style(f"{label if label != before else '':<{LABEL}}", "bold", colour) + wrapped[0])
        lines += [" " * LABEL + line for line in wrapped[1:]]
        before = label
    return "\n".join(lines)


def _key(key: dict[str, Any]) -> list[tuple[str, str]]:
    """What a cache depends on, in words."""
    rows = []
    for field, value in key.items():
        if field in ("samples", "sources") or value in ("", {}):
            continue
        if isinstance(value, dict) and field == "arguments":
            rows += [("arguments", f"{k} = {v}") for k, v in list(value.items())[:SHOWN]]
            rows += [("arguments", words.strip()) for words in _more(len(value))]
        elif isinstance(value, dict):
            rows.append((field, ", ".join(f"{k} {v}" for k, v in value.items())))
        else:
            rows.append((field, str(value)))
    return rows


def _sources(s: Sources | None) -> list[tuple[str, str]]:
    if s is None:
        return [("sources", "it does not say which files it was made from")]
    same = s.files - len(s.changed) - len(s.gone) - s.unknown
    counts = ((same, "as they were"), (len(s.changed), "changed"), (len(s.gone), "gone"), (s.unknown, "not to be told"))
    words = ", ".join(f"{n:,} {what}" for n, what in counts if n)
    rows = [("sources", f"{_count(s.files, 'file')}: {words}" if s.files else "no files")]
    for paths, what in ((s.changed, "changed"), (s.gone, "gone")):
        rows += [("sources", f"{what}: {shlex.quote(p)}") for p in paths[:SHOWN]]
        rows += [("sources", words.strip()) for words in _more(len(paths))]
    return rows


# -- verify, prune


def _verify(options: argparse.Namespace) -> int:
    from .cache import manage

    base = _base(options)
    paths = [manage.find(base, name) for name in options.names] or [c.path for c in manage.listed(base)]
    found = []
    for path in dict.fromkeys(paths):
        progress = _Progress("checking", path.name)
        try:
            found.append(manage.verify(path, _Telling(progress, path.name)))
        finally:
            progress.end()
    text = "\n".join(map(_verified, found)) or f"no caches in {base}"
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


def _verified(v: Verified) -> str:
    name = v.cache.name
    if v.error:
        return f"{name}: damaged: {_plain(v.error)}" + ": the next run makes it anew" * v.mended
    if not v.damaged:
        if v.cache.state == "refused":
            return f"{name}: nothing in it is used: {_plain(v.cache.reason)}"
        return f"{name}: {_count(v.checked, 'sample')}, all whole"
    which = ", ".join(map(str, v.damaged[:SHOWN])) + ", ..." * (len(v.damaged) > SHOWN)
    then = "let go, and the next run makes them anew" if v.mended else "not served; the folder can only be read"
    return f"{name}: {len(v.damaged):,} of {_count(v.checked, 'sample')} damaged: {which}: {then}"


def _prune(options: argparse.Namespace) -> int:
    if not (options.names or options.older_than is not None or options.unused or options.all):
        raise UsageError("prune wants to be told what to remove: NAME, --older-than DAYS, --unused or --all")
    if options.names and options.all:
        raise UsageError("NAME or --all, not both")
    from .cache import manage

    base = _base(options)
    older_s = None if options.older_than is None else options.older_than * DAY_S
    found = manage.prune(base, options.names, older_s, options.unused, options.dry_run)
    _give(options, {"dir": str(base), "dry_run": options.dry_run, **found.as_dict()}, _pruned(found, base, options))
    for cache in found.left:
        _say(f"{cache.path} cannot be removed: is {base} yours to write to?")
    return int(bool(found.left))


def _pruned(found: Pruned, base: Path, options: argparse.Namespace) -> str:
    if not found.removed and not found.nbytes:
        return f"nothing to remove in {base}"
    lines = [f"{c.name}: {human_bytes(c.nbytes)}, {c.state}" for c in found.removed]
    return "\n".join([*lines, f"{human_bytes(found.nbytes)} {'would be freed' if options.dry_run else 'freed'}"])


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _more(n: int) -> list[str]:
    return [f"  ... and {n - SHOWN:,} more"] if n > SHOWN else []


def _plain(text: str) -> str:
    """What a file says must not steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
