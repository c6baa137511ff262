"""The curve that tuning measured: samples per second by number of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .rules_of_thumb import Guess


@dataclass(frozen=True)
class Point:
    """One count of workers on the curve, in samples per second.

    Attributes:
        workers: how many; 0 is no worker at all.
        rate: measured, the median; None where only the model speaks.
        low, high: 95 %.
        predicted: the model's.
        windows: how often it was measured.
    """

    workers: int
    rate: float | None
    low: float | None
    high: float | None
    predicted: float | None
    windows: int


@dataclass(frozen=True)
class Guessed:
    """A formula's guess, and what it would have cost.

    Attributes:
        guess: the formula and its number.
        rate: samples per second with it; None where it was not tried.
        share: of the answer's rate.
        how: "measured", "model", or why it was not tried.
    """

    guess: Guess
    rate: float | None
    share: float | None
    how: str


class Curve(NamedTuple):
    """What a picture of the curve shows.

    Attributes:
        name: what was tuned.
        points: by number of workers.
        best: the answer's number of workers.
        rate, high: the answer's samples per second, and the upper end of their interval.
        guesses: rules of thumb.
    """

    name: str
    points: tuple[Point, ...]
    best: int
    rate: float
    high: float
    guesses: tuple[Guessed, ...]
