"""``stoker bench``: what the command line does with ``bench.measure``."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

from ..core import output
from ..core.errors import StokerError, UsageError
from ..core.progress import Progress
from .arguments import count, milliseconds, seconds, whole

EXAMPLE = """examples:
  stoker bench train.py:make_loader
  stoker bench train.py:make_loader --engine torch --num-workers 4 -n 500
  stoker bench train.py:make_loader --step 20 --json bench.json

TARGET is a DataLoader, a Dataset, or a function that returns one: path.py:name or package.module:name.
The loader runs as it is, with an empty loop; a Dataset gets stoker's, shuffled, without workers."""
TICK_S = 0.5  # between two lines of progress while a batch does not come


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's arguments."""
    p = commands.add_parser(
        "bench",
        help="how fast a loader is, without a model",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("target", metavar="TARGET", help="path.py:name or package.module:name")
    p.add_argument("-n", type=count, default=100, metavar="BATCHES", help="measured, beside the first (default: 100)")
    p.add_argument("--step", type=milliseconds, default=0.0, metavar="MS", help="wait so long after each batch, as "
                   "for a model")  # fmt: skip
    p.add_argument("--engine", choices=("torch", "stoker"), help="instead of the loader's own")
    p.add_argument("--num-workers", type=whole, metavar="N", help="instead of the loader's own")
    p.add_argument("--batch-size", type=count, metavar="N", help="instead of the loader's own; 32 for a dataset")
    p.add_argument("--budget-s", type=seconds, default=60.0, metavar="S", help="end after S seconds, with what was "
                   "measured by then (default: 60)")  # fmt: skip
    p.add_argument("--json", type=Path, metavar="FILE", help="the result as JSON; - for stdout")


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns its exit code.

    Raises:
        UsageError: wrong arguments, or a loader without a batch.
    """
    output.check(options.json)
    from ..loader.variant import as_loader, find, variant
    from .bench import measure  # which loads torch

    own = as_loader(find(options.target), name=options.target)
    loader = variant(own, options.num_workers, options.batch_size, options.engine)
    with _Ticker(Progress(options.target, options.budget_s)) as ticker:
        try:
            found = measure(loader, options.n, options.step, options.budget_s, options.target, ticker.say)
        except UsageError:
            raise
        except StokerError as e:
            ticker.end()
            print(f"stoker: {e}", file=sys.stderr)
            return 1
    output.give(found.as_dict(), options.json, lambda: print(found))
    return 0


class _Ticker:
    """Progress that goes on while one batch takes long, so a thread tells it; the loop only leaves its words here."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._words = progress, ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="stoker_progress", daemon=True)

    def __enter__(self) -> _Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def say(self, words: str) -> None:
        self._words = words

    def end(self) -> None:
        """The line is gone, and none comes after. Again: nothing."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            self._progress.end()

    def _tell(self) -> None:
        while not self._over.wait(TICK_S):
            self._progress(self._words)
