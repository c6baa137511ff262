"""Rules about reading: storage that is slow, or that is slow only the first time."""

from __future__ import annotations

from .loader_stats import MIN_BATCHES, LoaderStats, RuleFinding

MIN_WAITING = 0.3  # of a task's time, without the part in which the worker lacked a core
MIN_TIME_WITH_CORE = 0.5  # floor of that remaining part, of a task's time: less would be too little evidence
HELPERS_COMPUTE = 0.5  # cores
FIRST_EPOCH_SLOWER = 2.0  # times the later wait per batch
MIN_LOST = 0.1  # of the loop
MIN_SLEPT = 0.25  # of the time that the first epoch lost, which workers must have slept; otherwise cores were short
MIN_STORED = 16 << 20  # bytes read from storage


def slow_storage(stats: LoaderStats) -> RuleFinding | None:
    """Workers wait while cores are idle: for a disk, a network, or another process's lock."""
    if not stats.bottleneck or stats.loader.settings.worker_method == "thread":
        return None  # a thread that waits may wait for the interpreter's lock
    if stats.helper_cores >= HELPERS_COMPUTE:
        return None  # the fetching thread waits for other threads of its process, which compute
    shares = {**stats.code_shares("fetch", ran=False), **stats.code_shares("decode", ran=False)}
    part = sum(shares.values())
    # Reading again what the kernel evicted for lack of memory is not the storage's fault.
    if not shares or part - stats.stalled < MIN_WAITING * max(MIN_TIME_WITH_CORE, 1 - stats.coreless):
        return None
    line = max(shares, key=lambda code: shares[code])
    more = "divide the stream among more workers" if stats.repeats else "use more workers"
    can = not stats.loader.settings.no_workers
    remedy = f"{more}, which wait at the same time, or use a local copy" if can else "use a local copy"
    return RuleFinding(
        stats.share * part * stats.explained_by_code,
        {"line": line, "share_of_a_task": part, "looks": stats.loader.looks},
        f"workers wait {part:.0%} of a task's time at {line}: {remedy}",
        stats.without(part),
    )


def cold_cache(stats: LoaderStats) -> RuleFinding | None:
    """The first epoch reads from storage, the others from memory."""
    loader = stats.loader
    epochs = [e for e in loader.by_epoch if e.batches >= MIN_BATCHES]
    if len(epochs) < 2 or loader.kernel.stored < MIN_STORED or loader.cache.filled:
        return None  # filling stoker's cache makes the first epoch longer, whatever was read
    first, *others = (e.later_wait_s / e.batches for e in epochs)
    later = sum(others) / len(others)
    if first < FIRST_EPOCH_SLOWER * max(later, 1e-6):
        return None
    lost_s = (first - later) * epochs[0].batches
    share = lost_s / stats.total if stats.total else 0.0
    # The first epoch may be slow for other reasons. Workers that wait for a disk sleep: they neither compute nor want a
    # core.
    kernel_says_s = stats.worked - loader.stages.worker.cpu_s - loader.kernel.delay_ns / 1e9
    slept_s = max(stats.waits * stats.worked, kernel_says_s)
    if share * stats.weight < MIN_LOST or slept_s < MIN_SLEPT * lost_s:
        return None
    return RuleFinding(
        share,
        {"first_epoch_wait_ms": first * 1e3, "later_wait_ms": later * 1e3, "stored_bytes": loader.kernel.stored},
        "only the first epoch waits for storage: with many epochs, nothing needs to be done; otherwise read the "
        "files once before",
        1 / (1 - share),
    )
