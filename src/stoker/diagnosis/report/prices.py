"""What waiting costs, typed: the report's key ``money``. ``money`` works it out; prices are the user's alone."""

from __future__ import annotations

from msgspec import Struct


class Prices(Struct, frozen=True):
    """What the user pays for an hour, in any currency: for one GPU, how many there are (0: those of the machine, at
    least 1), and for one CPU core."""

    gpu: float
    gpus: int = 0
    cpu: float | None = None

    @property
    def day(self) -> float:
        return 24 * self.gpu * self.gpus


class Saving(Struct):
    """What a finding's fix saves of a day's price. ``at_most``: no setting is the fix, so how much of the cause
    remains is not known; without a predicted speed-up it is what the cause costs."""

    cause: str
    loader: str
    per_day: float
    at_most: bool = False
    applied: bool = False


class MoreCores(Struct):
    """More CPU cores for a loader whose workers use all there are. ``break_even``: the price of a core and hour from
    which on they cost more than they save; ``costs_per_day`` is None where no price of a core is known."""

    loader: str
    cores: int
    saves_per_day: float
    break_even: float
    costs_per_day: float | None = None


class Money(Struct):
    """``waiting_share``: of the loops' time, first batches included, the part in which the GPUs wait for data."""

    prices: Prices
    waiting_share: float
    waiting_per_day: float
    savings: list[Saving] = []
    more_cores: list[MoreCores] = []
