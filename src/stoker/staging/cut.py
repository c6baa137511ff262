"""Where to cut, where not everything fits: what goes into a late stage may be much smaller than what comes out of it.

``ToTensor`` makes 12 kB of pixels 49 kB of floats. A budget that holds a quarter of the floats holds all of the pixels,
and to make the floats each time costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PAYS = 0.9  # of the time of an epoch with everything kept that is deterministic; what saves less is not worth it


class Step(NamedTuple):
    """A stage, for one sample.

    Attributes:
        nbytes: of what it makes; inf where that cannot be kept.
        seconds: that it takes.
    """

    nbytes: float
    seconds: float


def choose(steps: Sequence[Step], read_s: float, other: float, room: float) -> int:
    """How many stages to keep.

    Args:
        steps: the deterministic stages, before them a step for what goes into the first.
        read_s: seconds of what comes before them.
        other: bytes of a sample that are kept beside what the stages make.
        room: bytes that there are for a sample, if all are to fit.

    Returns:
        That with which an epoch's preparing is shortest; all of them where it makes no difference.

    Example:
        >>> floats = [Step(600, 0.0), Step(12, 1.0), Step(49, 0.1)]
        >>> choose(floats, 2.0, 0, 49), choose(floats, 2.0, 0, 13), choose(floats, 2.0, 0, 6)
        (2, 1, 1)
    """
    whole = read_s + sum(step.seconds for step in steps)

    def epoch(k: int) -> float:
        share = min(1.0, room / max(1.0, other + steps[k].nbytes))
        return whole - share * (whole - sum(step.seconds for step in steps[k + 1 :]))

    last = len(steps) - 1
    best = min(range(last, -1, -1), key=epoch)
    return best if epoch(best) < PAYS * epoch(last) else last
