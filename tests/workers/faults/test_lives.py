"""Whole lives of loaders, drawn at random: epochs left early, batches held, workers killed, stopped and resized in any
order, and in the end the batches of a loader to which nothing happened."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stoker

SEED = int(os.environ.get("STOKER_SEED", "0"))
LIVES, LIMIT_S = 6, 100


class Rows(Dataset):
    """Index and draws from all generators; ``quiet`` for threads, which share those."""

    def __init__(self, n: int, floats: int, bad: list[int], quiet: bool) -> None:
        self.n, self.floats, self.bad, self.quiet = n, floats, bad, quiet

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        if i in self.bad:
            raise ValueError(f"sample {i}")
        drawn = [0.0, 0.0, 0.0] if self.quiet else [float(torch.rand(())), random.random(), float(np.random.rand())]
        return torch.cat([torch.tensor([float(i), *drawn]), torch.full((self.floats,), float(i))])


class Batched(Rows):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[i] for i in indices]


class Life:
    def __init__(self, seed: int) -> None:
        r = self.r = random.Random(seed)
        self.auto = r.random() < 0.5
        how = r.choice(["fork", "fork", "fork", "thread", "forkserver"])
        kw: dict[str, Any] = {
            "batch_size": r.choice([None, 1, 2, 4]),
            "shuffle": r.random() < 0.7,
            "num_workers": "auto" if self.auto else r.choice([1, 2, 3]),
            "persistent_workers": r.random() < 0.5,
        }
        if not self.auto:
            kw["prefetch_factor"] = r.choice([1, 2, 4])
            kw["task_seeds"] = r.random() < 0.3
        if how == "thread":
            kw["worker_method"] = how
        elif how != "fork":
            kw["multiprocessing_context"] = how
        n = r.choice([40, 150, 400])
        bad = r.sample(range(n), 3) if r.random() < 0.3 else []
        if bad:
            kw["on_error"] = "skip"
        elif how != "thread" and r.random() < 0.3:
            kw["sample_timeout"] = 60
        self.kills = how != "thread" and r.random() < 0.7
        cls = Batched if kw["batch_size"] and r.random() < 0.3 else Rows
        self.data, self.kw = cls(n, r.choice([0, 0, 20_000]), bad, how == "thread"), kw
        self.ends = [r.choice([None, None, r.randrange(1, n // 4)]) for _ in range(r.choice([1, 2, 3]))]

    def live(self, calm: bool) -> list[torch.Tensor]:
        loader: Any = stoker.DataLoader(self.data, **self.kw)
        if self.auto:
            loader.resize(2)
        out = []
        for epoch, end in enumerate(self.ends):
            torch.manual_seed(epoch)
            random.seed(epoch)
            np.random.seed(epoch)
            held = []
            for k, batch in enumerate(it := iter(loader)):
                held.append(batch if self.r.random() < 0.3 else batch.clone())
                if not calm:
                    self.shake(loader, it)
                if k + 1 == end:
                    break
            out.append(torch.cat([b.reshape(-1, 4 + self.data.floats)[:, :5] for b in held]))
            del it
        return out

    def shake(self, loader: Any, it: Any) -> None:
        r = self.r
        if self.kills and r.random() < 0.05:
            running = [p for p in it._workers if p.is_alive()]
            how = r.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGSTOP])
            if running:
                pid = r.choice(running).pid
                with contextlib.suppress(ProcessLookupError):  # an earlier blow may have ended it just now
                    os.kill(pid, how)
                if how == signal.SIGSTOP:
                    threading.Timer(0.05, wake, [pid]).start()
        if self.auto and r.random() < 0.1:
            loader.resize(r.randint(1, 4))
        if r.random() < 0.02:
            gc.collect()


def wake(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def lives(seeds: list[int]) -> None:
    """Each in a process of its own, forked from this one, which has imported torch for all of them."""
    for seed in seeds:
        child = os.fork()
        if not child:
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            main(seed)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            sys.exit(f"seed {seed}: exit code {code}")


def main(seed: int) -> None:
    import warnings

    from stoker.workers import restart

    warnings.simplefilter("ignore")
    restart.MAX_DEATHS_ON_START, restart.MAX_TOKENS = 1 << 30, 1e9
    life = Life(seed)
    print(life.kw, len(life.data), life.data.floats, life.data.bad, life.kills, life.ends, flush=True)
    calm, shaken = life.live(calm=True), life.live(calm=False)
    for epoch, (a, b) in enumerate(zip(calm, shaken, strict=True)):
        assert torch.equal(a, b), f"epoch {epoch} differs"


@pytest.mark.slow
@pytest.mark.timeout(LIVES * LIMIT_S)
def test_a_life_gives_the_batches_of_a_calm_one(tmp_path: Path) -> None:
    line = [sys.executable, "-X", "faulthandler", __file__]
    halves = [
        subprocess.Popen(
            [*line, *map(str, range(SEED + k, SEED + LIVES, 2))],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for k in range(2)
    ]
    for half in halves:
        said, _ = half.communicate()
        assert half.returncode == 0, said[-6000:]


if __name__ == "__main__":
    lives([int(seed) for seed in sys.argv[1:]])
