"""Processes or threads: both are measured on the loader's own samples, and threads are taken only where they are safe.

The threads run in a throw-away process, so that a dataset that opens its files when first used does not open them here,
where workers would then share them.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from ..errors import UsageError
from ..options import Budget
from ..workers.draws import Noticed
from ..workers.process import ProcessPool
from ..workers.protocol import WorkerSpec
from ..workers.thread import ThreadPool, refuse
from .probe import LIMIT_S, Draw, _Prober, spec_of

GAIN = 1.05  # threads have to be faster by this much; else processes, in which more code is safe
ROUNDS = 2


def choose(loader: Any, budget: Budget) -> tuple[str, str]:
    """ "process" or "thread" for a loader, and why. Never raises for what its dataset does."""
    n = int(loader.num_workers)
    if loader._dataset_kind == _DatasetKind.Iterable:
        return "process", "an iterable dataset: it is not read twice to be measured"
    draw = Draw.like(loader)
    if draw is None:
        return "process", "a sampler of its own, whose order is not to be disturbed"
    no = unsafe(loader)
    if no:
        return "process", no
    context = loader.multiprocessing_context or torch.multiprocessing
    spec = spec_of(loader, n)
    here, there = context.Pipe()
    child = context.Process(target=_measure_threads, args=(spec, budget, draw, there), daemon=True)
    pool: ProcessPool | None = None
    deadline = time.monotonic() + 2 * LIMIT_S
    rates: dict[str, float] = {"process": 0.0, "thread": 0.0}
    try:
        child.start()
        there.close()
        pool = ProcessPool(spec, context, budget, [])
        prober = _Prober(pool, draw, deadline, n)
        for _ in range(ROUNDS):
            rates["process"] = max(rates["process"], prober.rate(n))
            here.send("go")
            if not here.poll(max(0.0, deadline - time.monotonic())):
                return "process", f"threads took too long to be measured in {2 * LIMIT_S:g} s"
            rate, who, error = here.recv()
            if error:
                return "process", f"a sample could not be loaded in a thread: {error}"
            if who:
                return "process", f"{who} draws from the process-wide random generators, which threads cannot reproduce"
            rates["thread"] = max(rates["thread"], rate)
    except Exception as e:
        return "process", f"threads could not be measured ({type(e).__name__}: {e})"
    finally:
        if pool is not None:
            pool.close(leave_s=0.0)
        if child.pid is not None:
            child.kill()
            child.join()
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


def _measure_threads(spec: WorkerSpec, budget: Budget, draw: Draw, pipe: Any) -> None:
    noticed = Noticed()
    pool = ThreadPool(spec, budget, noticed, [])
    prober = _Prober(pool, draw, time.monotonic() + 2 * LIMIT_S, spec.num_workers)
    noticed.said = True  # the parent says it
    while pipe.recv() == "go":
        try:
            pipe.send((prober.rate(spec.num_workers), noticed.who, None))
        except Exception as e:
            pipe.send((0.0, None, str(e.__cause__ or e).strip().splitlines()[-1]))
