"""Repeated measurements of one setting: their median, an interval, and when two of them differ for sure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Student's t, 97.5 %, by degrees of freedom from 1; beyond that the normal distribution is near enough.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
# What windows spread by (standard deviation of the logarithm) where few measurements have to stand for many: one right
# after the other, and whenever. A core whose sibling is busy is 1.6 times as slow, for seconds.
SPREAD, DRIFT = 0.04, 0.12


def t_quantile(freedom: float) -> float:
    """Two-sided 95 %."""
    return T[max(1, math.floor(freedom)) - 1] if freedom < len(T) + 1 else 1.96


def interval(rates: Sequence[float]) -> tuple[float, float]:
    """95 % for the rate, from the logarithms of its measurements.

    Example:
        >>> low, high = interval([98.0, 100.0, 102.0])
        >>> 90 < low < 100 < high < 110
        True
    """
    logs = [math.log(r) for r in rates]
    mean = statistics.fmean(logs)
    half = t_quantile(len(logs) + 1) * _spread(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean + half)


def gain(a: Sequence[float], b: Sequence[float], z: float = 1.96) -> tuple[float, float, float]:
    """How much faster ``b`` is than ``a``: the ratio of the means of the logarithms, and its interval, 95 % or, with
    another ``z``, as wide as that makes it (Welch, "The generalization of Student's problem when several different
    population variances are involved", 1947)."""
    x, y = [math.log(r) for r in a], [math.log(r) for r in b]
    mean = statistics.fmean(y) - statistics.fmean(x)
    vx, vy = _spread(x, DRIFT) ** 2 / len(x), _spread(y, DRIFT) ** 2 / len(y)
    freedom = (vx + vy) ** 2 / (vx**2 / (len(x) + 1) + vy**2 / (len(y) + 1))  # two each are of the prior
    half = t_quantile(freedom) / 1.96 * z * math.sqrt(vx + vy)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def paired(a: Sequence[float], b: Sequence[float], z: float = 1.96) -> tuple[float, float, float]:
    """The same of measurements in pairs, each right after its other: what slows both does not count.

    Example:
        >>> ratio, low, high = paired([100.0, 60.0, 80.0], [110.0, 66.0, 88.0])
        >>> round(ratio, 3), low > 1.03, high < 1.17
        (1.1, True, True)
    """
    logs = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    mean = statistics.fmean(logs)
    half = t_quantile(len(logs) + 1) / 1.96 * z * _spread(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def _spread(logs: Sequence[float], prior: float = SPREAD) -> float:
    """A few measurements say little of their spread: they count together with what windows here spread by."""
    n = len(logs)
    own = statistics.variance(logs) if n > 1 else prior**2
    weight = max(0, n - 1)
    return math.sqrt((weight * own + 2 * prior**2) / (weight + 2))
