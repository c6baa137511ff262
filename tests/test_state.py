"""Save and resume: the rest of a run is that of the run which nobody stopped, to the bit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import stoker

EPOCHS = 3


def draw() -> tuple[float, float]:
    """Random numbers as an augmentation draws them: from the worker's generators."""
    info = get_worker_info()
    rng = getattr(info, "rng", None) if info is not None and getattr(info, "worker_method", "") == "thread" else None
    python, cpu = (random, None) if rng is None else (rng.random_generator, rng.torch_generator)
    return python.random(), float(torch.rand((), generator=cpu))


class Augmented(Dataset[Any]):
    def __init__(self, n: int = 11, augment: bool = True) -> None:
        self.n, self.augment = n, augment

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return (i, *draw()) if self.augment else i


def of_worker(n: int) -> range:
    info = get_worker_info()
    return range(n) if info is None else range(info.id, n, info.num_workers)


class Stream(IterableDataset[Any]):
    """Divides itself by worker, shuffles a little, and has no state."""

    def __init__(self, n: int = 11, augment: bool = True) -> None:
        self.n, self.augment = n, augment

    def __iter__(self) -> Iterator[Any]:
        for i in of_worker(self.n):
            yield (i, *draw()) if self.augment else i


class Counted:
    def __init__(self, items: range, augment: bool) -> None:
        self.items, self.augment, self.at = items, augment, 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.items):
            raise StopIteration
        i = self.items[self.at]
        self.at += 1
        return (i, *draw()) if self.augment else i

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StatefulStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        return Counted(of_worker(self.n), self.augment)


def plain(batch: Any) -> Any:
    if isinstance(batch, (list, tuple)):
        return [plain(b) for b in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def loader_of(dataset: Any, workers: Any, method: str = "process", **more: Any) -> stoker.DataLoader[Any]:
    return stoker.DataLoader(dataset, num_workers=workers, worker_method=method, **{"batch_size": 2, **more})


def run(loader: Any, epochs: int = EPOCHS) -> tuple[list[list[Any]], list[list[Any]]]:
    """Every batch of every epoch, and a state before the first, after each, and after the end."""
    batches, states = [], []
    for _ in range(epochs):
        it = iter(loader)
        batches.append([])
        states.append([saved(loader)])
        for batch in it:
            batches[-1].append(plain(batch))
            states[-1].append(saved(loader))
        states[-1].append(saved(loader))
    return batches, states


def saved(loader: Any) -> str:
    text = json.dumps(loader.state_dict())
    assert len(text) < 10_000
    return text


def rest(loader: Any, state: str, epochs: int) -> list[list[Any]]:
    torch.manual_seed(987)  # another process
    random.seed(987)
    loader.load_state_dict(json.loads(state))
    return [[plain(b) for b in loader] for _ in range(epochs)]


def check_everywhere(before: Any, after: Any, step: int = 1) -> None:
    """``before`` and ``after`` make loaders: a run by one is resumed by the other at every batch."""
    torch.manual_seed(7)
    random.seed(7)
    whole, states = run(before())
    places = [(e, k) for e, of_epoch in enumerate(states) for k in range(len(of_epoch))]
    for e, k in places[::step]:
        ended = k == len(whole[e]) + 1
        wanted = whole[e + 1 :] if ended else [whole[e][k:], *whole[e + 1 :]]
        assert rest(after(), states[e][k], len(wanted)) == wanted, (e, k)
