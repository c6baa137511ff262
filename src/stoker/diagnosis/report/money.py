"""What waiting for data costs per day, what each fix saves, and when CPU cores are cheaper than waiting GPUs.

A *day* is 24 hours of loops like those in the report. Time before the first loop does not count, because in a short
trial run it would be mostly imports. A loop that becomes s times as fast saves 1 - 1/s of a day's price.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from ...core.terminal import counted, short
from ..doctor.loader_stats import MIN_GAPS, LoaderStats
from ..doctor.workers import FULL, cores_wanted, cpu_s
from .prices import Money, MoreCores, Prices, Saving
from .schema import Finding, LoaderReport, RunReport

MOST_CORES = 1024  # most cores to add; one machine does not have more for rent


def of(report: RunReport, prices: Prices) -> Money | None:
    """Returns the report's costs; None if no loader was iterated, so nothing could wait."""
    total = sum(loader.busy_s for loader in report.loaders)
    if not total:
        return None
    gpus = prices.gpus or len(report.machine.get("gpus") or ()) or 1
    prices = msgspec.structs.replace(prices, gpus=gpus)
    weights = {loader.name: loader.busy_s / total for loader in report.loaders}
    share = sum(map(_starved_s, report.loaders)) / total
    return Money(
        prices,
        share,
        share * prices.day,
        [_saving(f, weights.get(f.loader, 1.0), prices) for f in report.findings],
        [found for loader in report.loaders for found in _more_cores(report, loader, weights[loader.name], prices)],
    )


def _starved_s(loader: LoaderReport) -> float:
    """Returns the seconds of waiting. If enough waits were timed on the device, later waits count only as far as it
    starved."""
    device, first = loader.device, loader.stages.startup.wait_s
    starved = device.starved_share_of_wait if device.gaps >= MIN_GAPS else 1.0
    return first + max(0.0, loader.wait_s - first) * starved


def _saving(f: Finding, weight: float, prices: Prices) -> Saving:
    gain = f.measured_speedup if f.applied else f.predicted_speedup
    saved = f.share if gain is None else max(0.0, 1 - 1 / gain) if gain > 0 else 0.0
    exact = gain is not None and (f.applied or bool(f.change))  # else the prediction assumes the cause is gone entirely
    return Saving(f.cause, f.loader, saved * weight * prices.day, not exact, f.applied)


def _more_cores(report: RunReport, loader: LoaderReport, weight: float, prices: Prices) -> Iterator[MoreCores]:
    """Yields how many more cores to use, if all are busy and the loop still waits for its workers: the number that pays
    off most or, without a price per core, the number that ends the waiting."""
    ranks = len(report.ranks.each) if report.ranks else 1
    cores = int(report.machine.get("cores") or 0)
    stats = LoaderStats(loader, max(1, cores), weight=weight)
    if not cores or not stats.workers or not stats.bottleneck or loader.settings.processes != ranks:
        return
    if ranks * cores_wanted(stats) < FULL * cores:
        return
    work = ranks * (cpu_s(stats) + loader.stages.consumer.cpu_s) / stats.batches  # CPU seconds of a step in all ranks
    enough = math.ceil(work / stats.step) if stats.step * MOST_CORES > work else MOST_CORES

    def found(more: int) -> MoreCores:
        then = max(stats.step, work / (cores + more))
        saves = max(0.0, 1 - then / stats.loop) * weight * prices.day
        costs = None if prices.cpu is None else 24 * more * prices.cpu
        return MoreCores(loader.name, more, saves, saves / more / 24, costs)

    choices = [found(more) for more in range(1, max(1, min(MOST_CORES, enough - cores)) + 1)]
    best = choices[-1] if prices.cpu is None else max(choices, key=lambda c: c.saves_per_day - (c.costs_per_day or 0.0))
    if best.saves_per_day > 0:
        yield best


def sentences(money: Money) -> Iterator[str]:
    """Yields sentences on what waiting costs, what each fix saves, and what more cores would save."""
    prices = money.prices
    yield (
        f"waiting for data costs {money.waiting_per_day:,.2f} a day: {money.waiting_share:.0%} of "
        f"{counted(prices.gpus, 'GPU')} at {_price(prices.gpu)} an hour"
    )
    saved = [s for s in money.savings if s.per_day >= 0.005]
    for saving in saved:
        what = "applied, saves" if saving.applied else "its fix saves"
        yield f"{saving.cause}: {what} {'at most ' * saving.at_most}{saving.per_day:,.2f} a day"
    if len(saved) > 1:
        yield "these overlap: what one fix saves, another one cannot save again"
    for more in money.more_cores:
        what, saves = f"{counted(more.cores, 'more CPU core')} for {short(more.loader)}", f"{more.saves_per_day:,.2f}"
        if more.costs_per_day is None:
            limit = f"{_price(more.break_even)} an hour"
            yield f"{what} would save {saves} a day: cheaper than waiting GPUs while a core costs less than {limit}"
        elif more.costs_per_day < more.saves_per_day:
            yield f"{what} would save {saves} a day and cost {more.costs_per_day:,.2f}: cheaper than waiting GPUs"
        else:
            yield f"{what} would cost {more.costs_per_day:,.2f} a day and save {saves}: waiting GPUs are cheaper"


def _price(x: float) -> str:
    """Formats a price: two decimals from 1 up, else three significant digits, as for a core."""
    return f"{x:,.2f}" if x >= 1 else f"{x:.3g}"
