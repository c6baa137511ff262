"""Draws datasets by number and looks for a wrong bit: ``python -m tests.staging.explore FIRST LAST``.

Each is compared three ways: calls kept however short (``drawn`` and ``drawn_pairs``), and cut as deep as possible. What
is found is printed with its number; ``drawn.source_of(random.Random(number))`` is its source. Exit code 1: found one.
"""

from __future__ import annotations

import random
import sys
import time
import warnings

from tests.staging import drawn, drawn_pairs
from tests.staging.test_memoize_drawn import compare
from tests.staging.test_split_drawn import drawn as compare_cut

WAYS = {
    "calls": lambda seed: compare(drawn.source_of(random.Random(seed))),
    "pairs": lambda seed: compare(drawn_pairs.source_of(random.Random(seed))),
    "cut": lambda seed: compare_cut(random.Random(seed), deep=True, workers=False),
}


def main() -> int:
    warnings.simplefilter("ignore")
    found, said = 0, time.monotonic()
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        for way, look in WAYS.items():
            try:
                look(seed)
            except AssertionError as e:
                found += 1
                print(f"{way} {seed}: {str(e)[:300]}")
        if time.monotonic() - said > 2:
            said = time.monotonic()
            print(f"\r{seed}", end="", file=sys.stderr)
    print(f"{found} found")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
