"""The curve that tuning measured: samples per second by number of workers."""

from __future__ import annotations

from typing import NamedTuple


class Point(NamedTuple):
    """One number of workers, in samples per second.

    Attributes:
        workers: how many; 0 is no worker at all.
        rate: the median of the windows; None where it was not measured.
        low, high: the slowest and the fastest window.
        predicted: by the model; None where it has no figure.
        windows: how often it was measured.
    """

    workers: int
    rate: float | None
    low: float | None
    high: float | None
    predicted: float | None
    windows: int


class Curve(NamedTuple):
    """What a picture of the curve shows.

    Attributes:
        name: what was tuned.
        points: by number of workers.
        best, rate: the recommended number of workers, and its samples per second.
    """

    name: str
    points: tuple[Point, ...]
    best: int
    rate: float
