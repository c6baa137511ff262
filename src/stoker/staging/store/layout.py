"""How samples lie in a store, decided from the first few: in rows or in a heap, and whether compressed."""

from __future__ import annotations

import time
from typing import NamedTuple

from .block import pack, unpack
from .decode import layout
from .encode import Leaf

WORDS = 1 << 16  # bytes, at most, for the make of the rows
TRIALS = 8  # samples that are compressed to see whether it pays
SQUEEZE_SHARE = 0.1  # of the time that preparing takes, at most, for compressing: the first epoch must not be longer
PAYS = 0.9  # of the time of an epoch without compression; what saves less is not worth it

Samples = dict[int, tuple[str, list[Leaf]]]


class Decision(NamedTuple):
    """How samples lie.

    Attributes:
        words: the make of samples that lie in rows; "": all lie in a heap.
        rows: how many rows there is room for.
        squeezed: whether what lies in the heap is compressed.
        reason: why nothing is let in at all; "".
    """

    words: str = ""
    rows: int = 0
    squeezed: bool = False
    reason: str = ""


def decide(samples: Samples, of: int, budget: int, prepare_ns: float, squeeze: bool | None, trusted: bool) -> Decision:
    """Looks at the first samples.

    Args:
        samples: these.
        of: samples of the dataset.
        budget: bytes for all of them.
        prepare_ns: what one costs to prepare.
        squeeze: whether samples are compressed; None: where the set does not fit and it pays.
        trusted: whether pickled leaves may be read.
    """
    makes = {words for words, _ in samples.values()}
    words = min(makes, key=len)
    made = layout(words, trusted)
    each = sum(x.nbytes for _, leaves in samples.values() for x in leaves) / len(samples)
    if squeeze is None:
        squeeze = each * of > budget and _pays(samples, each, of, budget, prepare_ns)
    if squeeze or len(makes) > 1 or not made.fixed or not made.nbytes or len(words) > WORDS:
        return Decision(squeezed=squeeze)
    if made.nbytes > budget:
        return Decision(reason=f"a sample of {made.nbytes:,} bytes is more than the budget of {budget:,}")
    return Decision(words, min(of, budget // made.nbytes))


def _pays(samples: Samples, each: float, of: int, budget: int, prepare_ns: float) -> bool:
    """Whether an epoch of compressed samples, more of them in, is shorter. Measured on these."""
    some = list(samples.items())[:TRIALS]
    began = time.perf_counter_ns()
    blobs = [pack(words, leaves, i, True) for i, (words, leaves) in some]
    middle = time.perf_counter_ns()
    for blob in blobs:
        unpack(blob, 0, True)
    squeeze_ns, restore_ns = (middle - began) / len(some), (time.perf_counter_ns() - middle) / len(some)
    small = sum(map(len, blobs)) / len(blobs)
    plain, more = (min(1.0, budget / of / n) for n in (each, small))
    lazy, squeezed = (1 - plain) * prepare_ns, (1 - more) * prepare_ns + more * restore_ns
    return squeeze_ns < SQUEEZE_SHARE * prepare_ns and squeezed < PAYS * lazy
