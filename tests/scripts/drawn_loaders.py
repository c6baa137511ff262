"""Loaders drawn at random, for comparing the batches of one kind of workers with those of another."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

import stoker
from stoker_ray.checks import digests


class Drawn(torch.utils.data.Dataset):
    """Samples with random numbers of three kinds, in tensors, arrays, dicts and strings.

    Args:
        n: how many.
        ms: that each takes.
        size: of a tensor in it.
        bad: indices of those that cannot be read.
    """

    def __init__(self, n: int, ms: float, size: int = 500, bad: Sequence[int] = ()) -> None:
        self.n, self.ms, self.size, self.bad = n, ms, size, frozenset(bad)
        self.added = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        time.sleep(self.ms / 1000)
        if i in self.bad:
            raise ValueError(f"sample {i} cannot be read")
        x = torch.rand(self.size) + i + self.added
        return {"x": x, "name": f"sample {i}", "y": random.random(), "z": (i, torch.randn(2)), "a": np.random.rand(2)}


def pairs(samples: list[dict[str, Any]]) -> tuple[list[str], torch.Tensor]:
    return [s["name"] for s in samples], torch.stack([s["x"][:2] for s in samples]) + torch.rand(2)


def begin(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.added = 1000  # type: ignore[attr-defined]
    random.seed(worker)  # of no effect: each batch has its random state


class Configuration:
    """A loader, and what is done with it.

    Args:
        seed: it is drawn from this.

    Attributes:
        left: epoch and batch at which it is left early.
        resumed: epoch and batch after which its state goes to a new loader, which goes on.
        resumed_with: ``worker_method`` of that.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.seed = seed
        n = rng.randrange(100, 300)
        bad = rng.sample(range(n), rng.choice([0, 0, 1, 9]))
        self.dataset = Drawn(n, rng.choice([0, 1, 4]), rng.choice([3, 500, 40_000]), bad)
        self.left = (0, rng.randrange(12)) if rng.random() < 0.3 else None
        self.resumed = (1, rng.randrange(12)) if rng.random() < 0.4 else None
        self.resumed_with = rng.choice(["ray", "process"])
        closure: int = rng.randrange(9)
        own_generator = rng.random() < 0.3
        self.options: dict[str, Any] = {
            "num_workers": rng.choice([1, 2, "auto"]),
            "persistent_workers": rng.random() < 0.3,
            "pin_memory": rng.random() < 0.3,
            "collate_fn": rng.choice([None, pairs, lambda samples: (default_collate(samples), closure)]),
            "worker_init_fn": rng.choice([None, None, begin]),
            "on_error": rng.choice(["raise", "skip"]),
            "quarantine": None,
        }
        if rng.random() < 0.3:
            self.options["prefetch_factor"] = rng.choice([1, 4])
        self._own_generator = own_generator
        self._order = rng.choice(["in order", "shuffled", "shuffled", "weighted", "subset", "batch sampler"])
        self._batch = rng.choice([1, 3, 8]), rng.random() < 0.3

    def loader(self, method: str) -> stoker.DataLoader:
        """A new one, always the same but for its workers."""
        n, options = self.dataset.n, dict(self.options)
        generator = torch.Generator().manual_seed(self.seed) if self._own_generator else None
        if self._order == "batch sampler":
            sampler: Sampler = RandomSampler(range(n), generator=generator)
            options["batch_sampler"] = BatchSampler(sampler, *self._batch)
        else:
            options |= {"batch_size": self._batch[0], "drop_last": self._batch[1], "generator": generator}
            if self._order == "weighted":
                options["sampler"] = WeightedRandomSampler([1.0 + i % 3 for i in range(n)], n, generator=generator)
            elif self._order == "subset":
                options["sampler"] = SubsetRandomSampler(range(0, n, 2), generator)
            else:
                options["shuffle"] = self._order == "shuffled"
        return stoker.DataLoader(self.dataset, worker_method=method, task_seeds=True, **options)

    def run(
        self,
        method: str,
        make: Callable[[str], stoker.DataLoader],
        begun: Callable[[stoker.DataLoader], None],
        interrupted: bool,
    ) -> list[str]:
        """Two epochs.

        Args:
            method: ``worker_method``.
            make: a loader of it, see ``loader``.
            begun: called with the loader when an iterator has been made.
            interrupted: whether it is resumed by another loader.

        Returns:
            Of each batch its hash, or what went wrong.
        """
        loader, out = make(method), []
        it = None
        for epoch in range(2):
            torch.manual_seed(self.seed + epoch)
            del it  # an epoch that was left early is over when nobody can go on with it
            it = iter(loader)
            begun(loader)
            for k, hashed in enumerate(_hashes(it)):
                out.append(hashed)
                if self.left == (epoch, k):
                    break
                if interrupted and self.resumed == (epoch, k):
                    state = loader.state_dict()
                    loader = make(self.resumed_with)
                    loader.load_state_dict(state)
                    it = iter(loader)
                    begun(loader)
                    out += _hashes(it)
                    break
        return out


def _hashes(it: Iterator[Any]) -> Iterator[str]:
    while True:
        try:
            yield str(digests(next(it)))
        except StopIteration:
            return
        except ValueError as e:
            yield str(e).strip().splitlines()[-1]
