"""``stoker verify``: the samples of a dataset that cannot be read; ``verify`` reads them."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import output
from ..core.errors import StokerError, UsageError
from ..core.files import check_writable
from ..core.progress import QUIET_S, Progress
from ..core.terminal import human_seconds
from .arguments import seconds, workers

if TYPE_CHECKING:
    from ..workers.faults.policy import Failure
    from .verify import Verified

SHOWN = 20  # samples that are named; --json and --quarantine have all
EXAMPLE = """examples:
  stoker verify train.py:train_set
  stoker verify train.py:make_loader --workers 8 --json broken.json
  stoker verify train.py:train_set --quarantine broken.jsonl
  stoker verify train.py:train_set --again broken.jsonl     are they mended?

TARGET is a Dataset, a DataLoader, or a function that returns one: path.py:name or package.module:name. Each sample is
loaded once and let go; of a stoker.Staged what it is made of is read, not its cache. Samples whose worker dies of them
are found, too, and with --sample-timeout those that hang. Exit code 0: all could be read; 1: some could not; 2: wrong
usage."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's arguments."""
    p = commands.add_parser(
        "verify",
        help="read a whole dataset and list what is broken",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("target", metavar="TARGET", help="path.py:name or package.module:name")
    p.add_argument("--workers", type=workers, default="auto", metavar="N|auto", help="worker processes; 0 reads in "
                   "the command's own (default: auto)")  # fmt: skip
    p.add_argument("--sample-timeout", type=seconds, metavar="S", help="a sample that takes longer is broken (default: "
                   "it may take as long as it likes)")  # fmt: skip
    p.add_argument("--again", type=Path, metavar="FILE", help="only the samples that this quarantine lists")
    p.add_argument("--quarantine", type=Path, metavar="FILE", help="add what is broken to this list, one line of JSON "
                   "each")  # fmt: skip
    p.add_argument("--json", type=Path, metavar="FILE", help="the result as JSON; - is stdout, instead of the text")


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns its exit code.

    Raises:
        UsageError: wrong arguments.
    """
    output.check(options.json)
    if options.quarantine is not None:
        check_writable(options.quarantine)
    from ..loader.variant import as_loader, find  # which loads torch

    loader = as_loader(find(options.target), name=options.target)
    from ..workers.faults import quarantine
    from .verify import verify

    progress = _Progress(options.target)
    try:
        found = verify(loader, options.workers, options.again, progress.tell, options.sample_timeout)
    except UsageError:
        raise
    except StokerError as e:
        progress.end()
        sys.stderr.write(f"stoker: {e}\n")
        return 1
    finally:
        progress.end()
    if options.quarantine is not None and found.failed:
        try:
            quarantine.append(options.quarantine, found.failed, type(loader.dataset).__name__)
        except OSError as e:
            raise UsageError(f"{options.quarantine} cannot be written: {e.strerror or e}") from e
    output.give(found.as_dict(), options.json, lambda: print(_text(found)))
    return int(bool(found.failed))


class _Progress(Progress):
    def tell(self, found: Verified) -> None:
        """One line that changes; where there is no terminal, one line when it takes longer than two seconds."""
        words = f"{found.read:,} of {found.samples:,} samples ({found.read / found.samples:.0%})"
        words += f", {len(found.failed):,} broken" * bool(found.failed)
        if found.rate:
            words += f", about {human_seconds((found.samples - found.read) / found.rate)} left"
        if self._live:
            self(words)
        elif not self._said and time.monotonic() - self._began > QUIET_S:
            self._said = True
            sys.stderr.write(f"stoker: reading {self._name}: {words}\n")


def _text(found: Verified) -> str:
    rate = f"{found.rate:,.0f} samples/s" if found.read else "nothing to read"
    if not found.failed:
        return f"{found.samples:,} samples, all could be read ({rate})"
    lines = [f"{len(found.failed):,} of {found.samples:,} samples are broken ({rate})"]
    kinds = Counter(f.error.partition(":")[0] for f in found.failed)
    lines.append("  " + ", ".join(f"{n:,} {_plain(kind)}" for kind, n in kinds.most_common(SHOWN)))
    lines += [_line(f) for f in found.failed[:SHOWN]]
    if len(found.failed) > SHOWN:
        lines.append(f"... and {len(found.failed) - SHOWN:,} more: --json FILE lists them all")
    return "\n".join(lines)


def _line(f: Failure) -> str:
    return _plain(f"{f.index}: {f.file + ': ' if f.file else ''}{f.error}")


def _plain(text: str) -> str:
    """What a file says must not steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
