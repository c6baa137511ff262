"""The types of the report's key ``money``: what waiting costs. ``money.py`` computes it from the user's prices."""

from __future__ import annotations

from msgspec import Struct


class Prices(Struct, frozen=True):
    """What the user pays per hour, in any currency: for one GPU, and for one CPU core. ``gpus`` is the number of GPUs
    (0: the machine's, at least 1)."""

    gpu: float
    gpus: int = 0
    cpu: float | None = None

    @property
    def day(self) -> float:
        return 24 * self.gpu * self.gpus


class Saving(Struct):
    """What a finding's fix saves per day. ``at_most``: an upper bound, because no setting fixes the cause, so part of
    it may remain. Without a predicted speed-up, the saving is what the cause costs."""

    cause: str
    loader: str
    per_day: float
    at_most: bool = False
    applied: bool = False


class MoreCores(Struct):
    """More CPU cores for a loader whose workers use all available ones. ``break_even`` is the hourly price of a core
    above which they cost more than they save. ``costs_per_day`` is None without a price per core."""

    loader: str
    cores: int
    saves_per_day: float
    break_even: float
    costs_per_day: float | None = None


class Money(Struct):
    """What waiting costs. ``waiting_share`` is the share of the loops' time, including first batches, in which the GPUs
    wait for data."""

    prices: Prices
    waiting_share: float
    waiting_per_day: float
    savings: list[Saving] = []
    more_cores: list[MoreCores] = []
