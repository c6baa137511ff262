"""Processes or threads: both are measured on the loader's own samples, and threads are taken only where they are safe.

The threads run in a throw-away process, so that a dataset that opens its files when first used does not open them here,
where workers would then share them.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from ..errors import UsageError
from ..options import Budget
from ..workers.thread import refuse
from .bench import BadSample, Bench, PoolBench, TooSlow
from .probe import LIMIT_S, PREFETCH, TASKS, WINDOW_S
from .remote import Remote
from .tasks import Draw, Tasks

GAIN = 1.05  # threads have to be faster by this much; else processes, in which more code is safe
ROUNDS = 2


def choose(loader: Any, budget: Budget) -> tuple[str, str]:
    """ "process" or "thread" for a loader, and why. Never raises for what its dataset does."""
    n = int(loader.num_workers)
    if loader._dataset_kind == _DatasetKind.Iterable:
        return "process", "an iterable dataset: it is not read twice to be measured"
    if Draw.like(loader) is None:
        return "process", "a sampler of its own, whose order is not to be disturbed"
    no = unsafe(loader)
    if no:
        return "process", no
    deadline = time.monotonic() + 2 * LIMIT_S
    rates = {"process": 0.0, "thread": 0.0}
    benches: list[Bench] = []
    try:
        threads = Remote(loader, Tasks(loader), "thread", budget, deadline)  # first: it forks while no worker is there
        benches.append(threads)
        processes = PoolBench(loader, Tasks(loader), "process", budget, deadline)
        benches.append(processes)
        for _ in range(ROUNDS):
            rates["process"] = max(rates["process"], processes.window(n, PREFETCH, WINDOW_S, TASKS).rate)
            processes.rest()
            try:
                w = threads.window(n, PREFETCH, WINDOW_S, TASKS)
            except TooSlow:
                return "process", f"threads took too long to be measured in {2 * LIMIT_S:g} s"
            except BadSample as e:
                return "process", f"a sample could not be loaded in a thread: {e}"
            threads.rest()
            if w.who:
                return (
                    "process",
                    f"{w.who} draws from the process-wide random generators, which threads cannot reproduce",
                )
            rates["thread"] = max(rates["thread"], w.rate)
    except Exception as e:
        return "process", f"threads could not be measured ({type(e).__name__}: {e})"
    finally:
        for bench in benches:
            bench.close()
    best = "thread" if rates["thread"] >= GAIN * rates["process"] else "process"
    words = f"with {n} workers threads make {rates['thread']:.3g} batches/s, processes {rates['process']:.3g}"
    return best, words


def unsafe(loader: Any) -> str | None:
    """Why threads are not even tried: the dataset says so, or it holds what pickle refuses (files, connections, locks),
    which several threads would use at once."""
    try:
        refuse(loader.dataset)
        pickle.dumps(loader.dataset, protocol=5, buffer_callback=lambda _: None)
    except UsageError as e:
        return str(e)
    except Exception as e:
        return f"the dataset holds something that cannot be shared for sure ({type(e).__name__}: {e})"
    return None
