"""``stoker batch-size``: the largest batch that fits, from the command line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from ..errors import StokerError, UsageError
from ..report.schema import check_writable
from .batch_size import largest
from .target import as_loader, find

QUIET_S = 2.0  # nothing is said about a search that is over sooner


def command(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code.

    Raises:
        UsageError: wrong arguments, or not one sample fits; exit code 2.
    """
    path = None if options.json in (None, "-") else Path(options.json)
    if path is not None:
        check_writable(path)
    loader = as_loader(find(options.target), name=options.target)
    step = None if options.step is None else find(options.step)
    began = time.monotonic()

    def progress(words: str) -> None:
        if time.monotonic() - began >= QUIET_S:
            print(words, file=sys.stderr, flush=True)

    try:
        found = largest(loader, step, options.budget, options.most, options.margin, options.budget_s, progress)
    except UsageError:
        raise
    except StokerError as e:
        print(f"stoker: {e}", file=sys.stderr)
        return 1
    text = json.dumps(found.as_dict(), indent=2)
    if path is not None:
        path.write_text(text + "\n")
    print(text if options.json == "-" else found)
    return 0
