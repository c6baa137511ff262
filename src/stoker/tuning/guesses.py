"""Rules of thumb for the number of workers that people pass on, and what each of them gives on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..core import terminal


class GuessInputs(NamedTuple):
    """The numbers that the rules start from."""

    gpus: int  # that torch sees, at least 1
    cores: int  # granted to this process
    batch_size: float
    entries: int  # batches made ahead for each worker: prefetch_factor
    throughput: float  # samples per second at the knee


class GuessRule(NamedTuple):
    """One rule of thumb."""

    name: str
    formula: str  # for the number of workers, in words
    workers: Callable[[GuessInputs], float]


class Guess(NamedTuple):
    """What one rule gives here."""

    name: str
    formula: str
    workers: int
    rate: float | None = None  # samples per second with that many workers; None: it was not measured
    why: str = ""  # it was not measured


RULES = (
    GuessRule("4 workers a GPU", "4 x GPUs", lambda x: 4 * x.gpus),
    GuessRule("the cores", "cores", lambda x: x.cores),
    GuessRule("batch size over GPUs", "batch size / GPUs", lambda x: x.batch_size / x.gpus),
    GuessRule("batch size over cores", "batch size / cores", lambda x: x.batch_size / x.cores),
    GuessRule(
        "entries x batch x workers = GPUs x throughput",
        "GPUs x samples/s / (prefetch_factor x batch size)",
        lambda x: x.gpus * x.throughput / (x.entries * x.batch_size),
    ),
)


def guesses(inputs: GuessInputs) -> list[Guess]:
    """What each rule gives, not measured yet.

    Example:
        >>> [g.workers for g in guesses(GuessInputs(gpus=2, cores=6, batch_size=32, entries=2, throughput=640.0))]
        [8, 6, 16, 5, 20]
    """
    return [Guess(rule.name, rule.formula, max(1, round(rule.workers(inputs)))) for rule in RULES]


def guess_lines(found: tuple[Guess, ...], knee: float) -> list[str]:
    """One line for each guess, below a heading. ``knee``: samples per second of the measured knee."""
    out = [f"{'workers':>7}  {'samples/s':>9}  {'of the knee':>11}  first guess"]
    for g in found:
        share = "-" if g.rate is None else f"{g.rate / knee:.0%}"
        out.append(f"{g.workers:>7,}  {terminal.rate(g.rate):>9}  {share:>11}  {g.name}")
        out += [f"{'':33}not measured: {g.why}"] * bool(g.why)
    return out
