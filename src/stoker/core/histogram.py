"""A histogram of durations with bins of a quarter octave, so that a median is right to 9 %."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

BINS_PER_OCTAVE = 4
SLOW = 3.0  # a duration of more than this many medians is a slow one


def bin_of(seconds: float) -> int:
    """The bin of a duration; bin 0 is a microsecond and less."""
    return max(0, round(BINS_PER_OCTAVE * math.log2(max(seconds, 1e-6) * 1e6)))


def seconds_of(number: int) -> float:
    """The middle of a bin.

    Example:
        >>> abs(seconds_of(bin_of(0.25)) / 0.25 - 1) < 0.1
        True
    """
    return float(2 ** (number / BINS_PER_OCTAVE)) * 1e-6


class Slow(NamedTuple):
    """The durations of more than ``SLOW`` medians."""

    number: int  # how many there are
    share: float  # their part of the sum of all durations, 0 to 1


class Histogram:
    """Counts durations.

    Args:
        bins: counts by bin, which this histogram goes on counting in; without it a new one.

    Example:
        >>> times = Histogram()
        >>> times.add([0.1] * 5 + [2.0])
        >>> times.median() < 0.2, times.slow().number
        (True, 1)
    """

    def __init__(self, bins: dict[int, int] | None = None) -> None:
        self.bins: dict[int, int] = {} if bins is None else bins  # counts by bin

    def add(self, seconds: Iterable[float]) -> None:
        for s in seconds:
            number = bin_of(s)
            self.bins[number] = self.bins.get(number, 0) + 1

    def merge(self, other: Mapping[int, int]) -> None:
        """Adds the counts of another histogram."""
        for number, count in other.items():
            self.bins[number] = self.bins.get(number, 0) + count

    @property
    def count(self) -> int:
        return sum(self.bins.values())

    def quantile(self, part: float) -> float:
        """Seconds that this part of the durations does not exceed; 0.0 without any."""
        wanted, seen = part * self.count, 0
        for number in sorted(self.bins):
            seen += self.bins[number]
            if seen >= wanted:
                return seconds_of(number)
        return 0.0

    def median(self) -> float:
        return self.quantile(0.5)

    def slow(self) -> Slow:
        limit = SLOW * self.median()
        total = sum(count * seconds_of(number) for number, count in self.bins.items())
        slow = {number: count for number, count in self.bins.items() if seconds_of(number) > limit}
        seconds = sum(count * seconds_of(number) for number, count in slow.items())
        return Slow(sum(slow.values()), seconds / total if total else 0.0)
