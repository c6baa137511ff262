"""A histogram of durations with quarter-octave bins: a median is accurate to 9 %."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

BINS_PER_OCTAVE = 4
SLOW = 3.0  # durations above this many medians are slow


def bin_of(seconds: float) -> int:
    """Returns the bin of a duration; bin 0 holds a microsecond and less."""
    return max(0, round(BINS_PER_OCTAVE * math.log2(max(seconds, 1e-6) * 1e6)))


def seconds_of(number: int) -> float:
    """Returns the duration in the middle of a bin, in seconds."""
    return float(2 ** (number / BINS_PER_OCTAVE)) * 1e-6


class Slow(NamedTuple):
    """Durations above ``SLOW`` medians."""

    number: int  # how many
    share: float  # their share of the total duration, 0 to 1


class Histogram:
    """Counts durations. ``bins``: counts by bin, to which this histogram adds in place; None for new ones."""

    def __init__(self, bins: dict[int, int] | None = None) -> None:
        self.bins: dict[int, int] = {} if bins is None else bins

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
        """Duration in seconds that the given share of the durations does not exceed; 0.0 if there are none."""
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
