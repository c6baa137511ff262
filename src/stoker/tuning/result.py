"""What ``stoker tune`` found: the setting, the curve it comes from, and why."""

from __future__ import annotations

import html
import math
import sys
from dataclasses import asdict, dataclass, field

from ..core import terminal
from ..core.terminal import counted, rate
from ..core.types import JsonObject
from ..loader.auto.limits import Limit
from .curve import Point, bars, svg
from .guesses import Guess, guess_lines

SCHEMA = 2


@dataclass(frozen=True)
class Setting:
    """One value for each knob, by torch's names."""

    num_workers: int
    prefetch_factor: int = 2
    pin_memory: bool = False
    batch_size: int | None = None

    @property
    def size(self) -> tuple[float, int]:
        """Sort key for the smallest setting. No workers counts as largest: the loading then adds to the model's time
        instead of running in parallel."""
        return self.num_workers or math.inf, self.prefetch_factor

    @property
    def words(self) -> str:
        if not self.num_workers:
            return "no workers"
        size = "" if self.batch_size is None else f", batch {self.batch_size}"
        return f"{counted(self.num_workers, 'worker')}, prefetch {self.prefetch_factor}{size}"


@dataclass(frozen=True)
class TuneResult:
    """What ``stoker.tune`` found."""

    name: str  # what was tuned
    best: Setting  # the knee: the smallest setting within 3 % of the fastest
    # its samples per second, the median of its windows; ``low``, ``high``: the slowest and fastest
    rate: float
    low: float
    high: float
    curve: tuple[Point, ...]  # samples per second by workers, with the other knobs as in ``best``
    limits: tuple[Limit, ...]  # limits on the number of workers, the tightest first
    bound: Limit | None  # the limit that kept ``best`` small; None if more workers would not help
    reasons: dict[str, str]  # why each knob has its value, by torch's names
    lines: dict[str, str]  # to paste: ``{"torch": ..., "stoker": ...}``
    guesses: tuple[Guess, ...] = ()  # what rules of thumb give here; none where the number of workers may not move
    notes: tuple[str, ...] = ()  # further remarks
    tried: tuple[JsonObject, ...] = field(default=(), repr=False)  # every window, in order, with its samples per second
    seconds: float = 0.0  # duration of the tuning

    def as_dict(self) -> JsonObject:
        """For JSON; ``docs/tune.md`` has the schema."""
        return {
            "schema": SCHEMA,
            **asdict(self),
            "curve": [p._asdict() for p in self.curve],
            "guesses": [g._asdict() for g in self.guesses],
            "limits": [limit._asdict() for limit in self.limits],
            "bound": None if self.bound is None else self.bound._asdict(),
        }

    def __str__(self) -> str:
        return self.text(80, colour=False)

    def text(self, width: int, colour: bool) -> str:
        """Formats it for a terminal."""
        b = self.best

        def bold(words: str) -> str:
            return terminal.style(words, "bold", colour)

        knobs = counted(b.num_workers, "worker")
        if b.num_workers:
            knobs += f", prefetch_factor {b.prefetch_factor}"
        if "batch_size" in self.reasons:
            knobs += f", batch_size {b.batch_size}"
        head = f"{self.name}: {knobs}, {rate(self.rate)} samples/s [{rate(self.low)}..{rate(self.high)}]"
        out = [bold(head), "", *bars(self.curve, b.num_workers, width), ""]
        if self.guesses:
            out += [*guess_lines(self.guesses, self.rate), ""]
        out += [f"{name}: {words}" for name, words in self.reasons.items()]
        if self.bound is not None:
            out.append(f"bound by {self.bound.name}: {self.bound.words}")
        if self.notes:
            out += ["", *(f"note: {n}" for n in self.notes)]
        out += ["", "to paste", *(f"  {bold(line)}" for line in (self.lines["torch"], self.lines["stoker"]))]
        return "\n".join([*out, f"measured in {self.seconds:.1f} s"])

    def _repr_html_(self) -> str:
        return f"{self.drawing()}<pre>{html.escape(str(self))}</pre>"

    def drawing(self) -> str:
        """Samples per second against workers, drawn, with the knee and the guesses: a piece of HTML."""
        return svg(self.curve, self.best.num_workers, self.guesses)

    def show(self) -> None:
        """Prints it, with the width and colours of stdout."""
        print(self.text(terminal.width(sys.stdout), terminal.colour_wanted(sys.stdout)))
