"""Datasets, samplers and functions that the comparison with torch draws from. Module level, so that spawn can pickle them."""

from __future__ import annotations

import random
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

Point = namedtuple("Point", ["x", "y"])


class OddError(Exception):
    """Cannot be rebuilt from one message."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a}-{b}")


class MessageError(Exception):
    message = "always"

    def __init__(self, message: str) -> None:
        super().__init__(message)


@dataclass
class Record:
    x: torch.Tensor
    name: str


def make(kind: str, i: int) -> Any:
    """Sample ``i`` of a kind; the same for the same random state."""
    r = torch.arange(6, dtype=torch.float32).reshape(2, 3) + i
    match kind:
        case "tensor":
            return r
        case "scalar":
            return torch.tensor(i)
        case "int":
            return i
        case "float":
            return i / 3
        case "bool":
            return i % 2 == 0
        case "str":
            return f"sample {i}"
        case "bytes":
            return b"%d" % i
        case "pair":
            return r, i
        case "list":
            return [r, i, str(i)]
        case "dict":
            return {"x": r, "y": np.full((3,), i, np.int16), "s": str(i), "n": {"a": i, "b": [r, i * 1.5]}}
        case "point":
            return Point(r, i)
        case "numpy":
            return np.arange(4, dtype=np.float64) * i
        case "numpy_scalar":
            return np.float32(i)
        case "bf16":
            return r.to(torch.bfloat16), r.to(torch.float16), r.to(torch.complex64), r.to(torch.uint8), r > 2
        case "big":
            return torch.full((3, 40, 40), float(i)), i
        case "strided":
            return torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1) + i
        case "empty":
            return torch.empty(0, 3), i
        case "augmented":
            return torch.rand(3), random.random(), np.random.rand(2), r
        case "info":
            w = get_worker_info()
            return (-1, -1, -1) if w is None else (w.id, w.num_workers, w.seed)
        case "ragged":
            return torch.zeros(1 + i % 3)
        case "mixed":
            return torch.tensor(i) if i % 2 else torch.tensor(i / 2)
        case "none":
            return None
        case "object":
            return Record(r, str(i))
        case "channels":
            return (torch.arange(96.0).reshape(2, 3, 4, 4) + i).to(memory_format=torch.channels_last)
        case "foreign":
            return np.arange(3 + 1000 * (i % 2), dtype=">i4") + np.array(i, ">i4")
        case "grad":
            return torch.full((2,), float(i), requires_grad=True)
    raise AssertionError(kind)


MAP_KINDS = [
    "tensor", "scalar", "int", "float", "bool", "str", "bytes", "pair", "list", "dict", "point", "numpy", "numpy_scalar",
    "bf16", "big", "strided", "empty", "augmented", "augmented", "info", "ragged", "mixed", "none", "object", "grad",
    "channels", "foreign",
]  # fmt: skip
ERRORS = [None, None, None, "value", "key", "odd", "message", "stop"]


def fail(error: str | None, i: int) -> None:
    match error:
        case "value":
            raise ValueError(f"bad sample {i}")
        case "key":
            raise KeyError(f"no sample {i}")
        case "odd":
            raise OddError(i, 2)
        case "message":
            raise MessageError(message=f"bad {i}")
        case "stop":
            raise StopIteration(f"early {i}")


class Map(Dataset):
    def __init__(self, n: int, kind: str, error: str | None = None, bad: tuple[int, ...] = ()) -> None:
        self.n, self.kind, self.error, self.bad = n, kind, error, bad
        self.calls = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Any:
        self.calls += 1
        if int(i) in self.bad:
            fail(self.error, int(i))
        return make(self.kind, int(i))


class Batched(Map):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [make(self.kind, int(i)) for i in indices]


class Counting(Map):
    """Its samples show how often its copy was asked: workers that live on keep their copy."""

    def __getitem__(self, i: Any) -> Any:
        self.calls += 1
        return torch.tensor([int(i), self.calls])


class Stream(IterableDataset):
    def __init__(
        self, n: int, kind: str, error: str | None = None, bad: tuple[int, ...] = (), shard: bool = True
    ) -> None:
        self.n, self.kind, self.error, self.bad, self.shard = n, kind, error, bad, shard

    def __iter__(self) -> Any:
        w = get_worker_info()
        start, step = (w.id, w.num_workers) if w is not None and self.shard else (0, 1)
        for i in range(start, self.n, step):
            if i in self.bad:
                fail(self.error if self.error != "stop" else "value", i)
            yield make(self.kind, i)


class SizedStream(Stream):
    """Says how long it is, and may be wrong."""

    def __init__(self, said: int, **kw: Any) -> None:
        super().__init__(**kw)
        self.said = said

    def __len__(self) -> int:
        return self.said


class Uneven(Stream):
    """Workers run dry at different times."""

    def __iter__(self) -> Any:
        w = get_worker_info()
        share = 1 if w is None else w.id + 1
        for i in range(self.n // share):
            yield make(self.kind, i)


class LazySampler(Sampler):
    """Draws from the global random state as it goes, so that when it is asked can be seen afterwards."""

    def __init__(self, n: int, many: int) -> None:
        self.n, self.many = n, many

    def __len__(self) -> int:
        return self.many

    def __iter__(self) -> Any:
        for _ in range(self.many):
            yield int(torch.randint(self.n, ()))


class EagerSampler(LazySampler):
    """Draws when it is started: torch starts it twice in the first epoch with workers."""

    def __iter__(self) -> Any:
        return iter([random.randrange(self.n) for _ in range(self.many)])


class LazyBatches(LazySampler):
    def __iter__(self) -> Any:
        for _ in range(self.many):
            yield torch.randint(self.n, (1 + random.randrange(4),)).tolist()


def identity(batch: Any) -> Any:
    return batch


def aliasing(batch: list[Any]) -> Any:
    x = torch.cat([torch.as_tensor(make("tensor", i)) for i in range(len(batch))])
    return x, x[1:], x.t(), [x[0], x[0]]


def wrapping(batch: list[Any]) -> Any:
    return {
        "n": len(batch),
        "batch": torch.utils.data.default_collate(batch),
        "id": getattr(get_worker_info(), "id", None),
    }


def to_numpy(batch: Any) -> Any:
    return {
        "i": np.arange(5000),
        "ro": np.frombuffer(b"abcdefgh" * 200, np.uint8),
        "f": np.asfortranarray(np.ones((40, 50))),
    }


def refusing(batch: Any) -> Any:
    raise TypeError("refused")


COLLATES = [None, None, None, identity, aliasing, wrapping, to_numpy, refusing]


def init_numpy(worker: int) -> None:
    np.random.seed(worker)
    torch.manual_seed(worker + 5)


def init_bad(worker: int) -> None:
    if worker == 0:
        raise RuntimeError("init failed")


INITS = [None, None, None, init_numpy, init_bad]
