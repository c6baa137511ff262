"""Rules about what runs inside a task: decoding, transforms, collating, slow samples, work done again each epoch."""

from __future__ import annotations

from .loader_stats import MIN_BATCHES, LoaderStats, RuleFinding
from .loop import MIN_COLLATE, allocates_each_batch

MIN_CODE = 0.3  # of a task's time, in one decoder or one transform
MIN_SLOW_TIME = 0.1  # of the tasks' time, in slow tasks
MIN_SLOW_WAIT = 0.4  # of the waiting, in a few long waits
MIN_SLOW_TASKS = 3
MAX_SLOW_TASKS = 0.2  # of the tasks; if more are slow, the whole loader is slow
DELAYED = 0.4  # of a worker's life, without a core
MIN_REPEATED = 1.1  # speed-up of later epochs if remaking samples were free


def slow_decode(stats: LoaderStats) -> RuleFinding | None:
    """Workers spend their time turning bytes into arrays."""
    if not stats.bottleneck:
        return None
    shares = stats.code_shares("decode", waited=False)
    part = sum(shares.values())
    if part < MIN_CODE:
        return None
    name = max(shares, key=lambda decoder: shares[decoder])
    return RuleFinding(
        stats.share * part * stats.explained_by_code,
        {"decoder": name, "share_of_a_task": part, "looks": stats.loader.looks},
        f"{name} takes {part:.0%} of a worker's time: decode once and keep the result, or decode at a smaller size",
        stats.without(part),
    )


def slow_transform(stats: LoaderStats) -> RuleFinding | None:
    """One transform, or one line of ``__getitem__``, takes much of a worker's time."""
    if not stats.bottleneck:
        return None
    shares = {**stats.code_shares("fetch", waited=False), **stats.code_shares("transform")}
    name = max(shares, key=lambda code: shares[code], default="")
    part = shares.get(name, 0.0)
    if part < MIN_CODE:
        return None
    return RuleFinding(
        stats.share * part * stats.explained_by_code,
        {"transform": name, "share_of_a_task": part, "looks": stats.loader.looks},
        f"{name} takes {part:.0%} of a worker's time: do it once and keep the result, or do it on whole batches",
        stats.without(part),
    )


def slow_collate(stats: LoaderStats) -> RuleFinding | None:
    """Collating samples into a batch takes much of a worker's time."""
    part = stats.collate
    if not stats.bottleneck or part < MIN_COLLATE or allocates_each_batch(stats):
        return None
    shares = stats.code_shares("collate")
    line = max(shares, key=lambda code: shares[code], default="")
    most = f", {shares[line]:.0%} in {line}" if line else ""
    return RuleFinding(
        stats.share * part * stats.explained_by_code,
        {"share_of_a_task": part, "collate_ms_per_batch": part * (stats.service or 0.0) * 1e3, "line": line},
        f"collate_fn takes {part:.0%} of a worker's time{most}: move work that is the same in every epoch before the "
        "loop (store token ids of texts) or into __getitem__, and stack arrays instead of looping over elements",
        stats.without(part),
    )


def stragglers(stats: LoaderStats) -> RuleFinding | None:
    """A few samples take many times as long as the others, and the loop waits for them."""
    loader = stats.loader
    tasks, waits = loader.tasks, loader.waits
    if loader.cache.filled and not loader.filled_epochs:
        return None  # tasks that filled a cache are among these, and take longer than those that it served
    if not stats.starved or not stats.workers or not MIN_SLOW_TASKS <= tasks.slow_count <= MAX_SLOW_TASKS * tasks.count:
        return None
    if tasks.slow_share < MIN_SLOW_TIME or waits.slow_share < MIN_SLOW_WAIT:
        return None
    slow_s = tasks.slow_share * stats.worked
    if stats.delayed > DELAYED or slow_s / stats.workers < MIN_SLOW_TIME * stats.total:
        return None  # the slow tasks lacked a core, or tasks are so short that starting a worker made some long
    worst = sorted(tasks.slow_samples, key=lambda index: -tasks.slow_samples[index])[:5]
    names = f"; they contain samples {', '.join(worst)}" if worst else ""
    share = stats.share * waits.slow_share
    return RuleFinding(
        share,
        {"share_of_task_time": tasks.slow_share, "samples": worst},
        f"{tasks.slow_count} of {tasks.count} tasks take over 3 times the median{names}: fix or split those samples, "
        "or prefetch deeper",
        1 / max(1e-3, 1 - share),
    )


def cacheable_prefix(stats: LoaderStats) -> RuleFinding | None:
    """A remedy, not a cause: work that repeats in every epoch could be cached.

    ``stoker run`` does not call the dataset, so it cannot know how much of a sample is the same in every epoch. It
    reports how much of the loop goes into remaking samples, and predicts no gain."""
    epochs, settings = stats.loader.epochs, stats.loader.settings
    if not stats.starved or epochs < 2 or settings.iterable or stats.batches < MIN_BATCHES * epochs:
        return None
    if settings.applied:
        return None  # this run tried it and reports the result under what --apply did
    stages = stats.loader.stages
    fetch = stages.fetch.self_s / stages.made_s if stages.made_s else 0.0
    then, now = stats.without(fetch), stats.without(0.0)
    if not fetch or then is None or now is None or then < MIN_REPEATED * now:
        return None
    most = then / now  # a ratio of two predictions: what the model does not explain would remain with a cache
    return RuleFinding(
        1 - 1 / most,
        {"epochs": epochs, "share_of_a_task": fetch, "later_epochs_at_most": round(most, 2)},
        f"{fetch:.0%} of making batches is making samples, again in each of {epochs} epochs: stoker run --apply tries "
        f"to cache what is the same in all of them; later epochs would be up to {most:.1f}x as fast",
    )
