"""How long epochs take: the first, which starts workers and may fill a cache, and those after it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

WHOLE = 0.9  # of the batches of the longest epoch; one with fewer was left early, or is of another loader of the line
SECONDS, SAMPLES = 4, 5  # columns of ``by_epoch``


def epochs(by_epoch: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Wall clock of whole epochs, from the call of ``iter()`` to the end.

    Args:
        by_epoch: the report's.

    Returns:
        ``first`` and ``later`` (seconds; of the later ones the median, None where there was none), ``count`` (whole
        epochs), ``first_samples_per_s``, ``later_samples_per_s``, and ``each`` (seconds of each whole one); empty
        where no epoch is known.

    Example:
        >>> found = epochs([[10, 4.0, 1.0, 0.1, 5.0, 80], [10, 1.0, 1.0, 0.1, 2.0, 80], [10, 1.2, 1.0, 0.1, 2.2, 80]])
        >>> found["first"], found["later"], found["later_samples_per_s"]
        (5.0, 2.1, 38.0952380952381)
    """
    known = [row for row in by_epoch if len(row) > SAMPLES and row[0] and row[SECONDS] > 0]
    most = max((row[0] for row in known), default=0)
    whole = [row for row in known if row[0] >= WHOLE * most]
    if not whole:
        return {}
    first, *later = whole
    middle = statistics.median(row[SECONDS] for row in later) if later else None
    return {
        "count": len(whole),
        "first": first[SECONDS],
        "later": middle,
        "first_samples_per_s": first[SAMPLES] / first[SECONDS],
        "later_samples_per_s": statistics.median(r[SAMPLES] for r in later) / middle if middle else None,
        "each": [round(row[SECONDS], 4) for row in whole],
    }
