"""Datasets that are nothing but rows: gathered, and not to be told from torch's loop."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import stoker
from stoker.workers.gather import RowGather
from tests.contract.trace import canon, end

SEED = int(os.environ.get("STOKER_SEED", "0"))
N = 60


def kinds(folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    x = torch.from_numpy(rng.standard_normal((N, 3, 5)).astype(np.float32))
    np.save(folder / "a.npy", x.numpy())
    odd = x.clone()
    odd[::7] = float("nan")
    return {
        "tensors": TensorDataset(x, torch.arange(N), odd),
        "every dtype": TensorDataset(
            *[torch.arange(N).to(t) for t in (torch.bool, torch.uint8, torch.bfloat16, torch.complex64, torch.float64)]
        ),
        "large": TensorDataset(torch.arange(N * 9000).reshape(N, 9000), torch.arange(N)),
        "empty rows": TensorDataset(torch.empty(N, 0), torch.arange(N)),
        "not contiguous": TensorDataset(x.transpose(1, 2), x[:, :, 1]),
        "needs grad": TensorDataset(x.clone().requires_grad_()),
        "tensor": x,
        "array": x.numpy(),
        "one dimension": np.arange(N, dtype=np.float32),
        "integers": np.arange(N, dtype=np.int16),
        "memory map": np.load(folder / "a.npy", mmap_mode="r"),
        "read only": _read_only(x.numpy().copy()),
        "backwards": x.numpy()[::-1],
        "other byte order": x.numpy().astype(">f4"),
        "strings": np.array([str(i) for i in range(N)]),
        "objects": np.array([{"a": i} for i in range(N)], dtype=object),
        "subset": Subset(TensorDataset(x, torch.arange(N)), list(range(50, 3, -2))),
        "subset of an array": Subset(x.numpy(), np.arange(30)),  # type: ignore[arg-type]
        "subset of a subset": Subset(Subset(TensorDataset(x), range(40)), [3, 1, 5]),  # type: ignore[arg-type]
    }


def _read_only(a: Any) -> Any:
    a.flags.writeable = False
    return a


with tempfile.TemporaryDirectory() as _folder:
    KINDS = sorted(kinds(Path(_folder)))
# With workers the gather is the same and its batch travels; of those that travel alike one is enough. Not "needs grad":
# torch's loader hangs when a worker's batch cannot be sent.
IN_WORKERS = ("tensors", "large", "memory map", "objects")


def seen(cls: Any, dataset: Any, **kw: Any) -> list[Any]:
    torch.manual_seed(SEED)
    out: list[Any] = []
    loader = cls(dataset, **kw)
    for _ in range(2):
        it = iter(loader)
        try:
            out += [canon(batch) for batch in it]
        except Exception as e:
            out.append((type(e).__name__, str(e).splitlines()[0]))
        end(it)
    return out


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    ("kind", "workers"),
    [(kind, workers) for kind in KINDS for workers in (0, 2) if not workers or kind in IN_WORKERS],
)
def test_a_gather_is_the_loop(kind: str, workers: int, tmp_path: Path) -> None:
    rng = random.Random(f"{SEED}/{kind}/{workers}")
    dataset = kinds(tmp_path)[kind]
    n = len(dataset)
    wild = [[rng.randrange(-n, n + 2) for _ in range(rng.randrange(1, 6))] for _ in range(8)]  # from the end, beyond it
    ways: list[dict[str, Any]] = [
        {"batch_size": 7, "shuffle": True},
        {"batch_sampler": wild},
        {"batch_size": 7, "drop_last": True},
        {"batch_size": None},
        {"batch_sampler": [[0, 1], [torch.tensor(1), np.int64(2)], [True, False], [0]]},
    ]
    for kw in ways[:2] if workers else ways:
        assert seen(stoker.DataLoader, dataset, num_workers=workers, **kw) == seen(
            DataLoader, dataset, num_workers=workers, **kw
        ), kw


def test_what_is_gathered_and_what_is_not() -> None:
    class Mine(TensorDataset):
        pass

    def collate(batch: Any) -> Any:
        return batch

    default = torch.utils.data.default_collate
    x = torch.zeros(5, 2)
    for dataset, collate_fn, auto, expected in (
        (TensorDataset(x), default, True, True),
        (Subset(TensorDataset(x), [1]), default, True, True),
        (Mine(x), default, True, False),
        (Subset(Mine(x), [1]), default, True, False),
        (TensorDataset(x), collate, True, False),
        (TensorDataset(x), default, False, False),
    ):
        assert RowGather.fits(dataset, collate_fn, auto) is expected


def test_it_gathers() -> None:
    """The gather itself, and not the loop it may always fall back on."""

    def never(_: Any) -> Any:
        raise AssertionError

    x = torch.arange(20.0).reshape(10, 2)
    data = TensorDataset(x, torch.arange(10))
    gather = RowGather(data, lambda indices: torch.utils.data.default_collate([data[i] for i in indices]))
    gather([1])
    gather._loop = never
    a, b = gather([3, 0, 9])
    assert a.tolist() == [[6, 7], [0, 1], [18, 19]]
    assert b.tolist() == [3, 0, 9]
    assert gather.gathered == 1
    data.tensors = (x.clone(), torch.arange(10))  # another table: no longer what was compared
    with pytest.raises(AssertionError):
        gather([3])


def test_a_change_between_batches_is_seen() -> None:
    data = TensorDataset(torch.zeros(9))
    it = iter(stoker.DataLoader(data, batch_size=3))
    next(it)
    data.tensors[0].fill_(5)
    assert next(it)[0].tolist() == [5, 5, 5]
    data.tensors = (torch.ones(9),)
    assert next(it)[0].tolist() == [1, 1, 1]


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("wrapped", [False, True])
def test_quantized_tables_are_as_with_torch(wrapped: bool, workers: int) -> None:
    """A process that looks at their bytes is ended by torch."""
    table = torch.quantize_per_tensor(torch.arange(12.0).view(6, 2), 0.1, 0, torch.quint8)
    data: Any = TensorDataset(table) if wrapped else table
    found = [b[0] if wrapped else b for b in stoker.DataLoader(data, batch_size=4, num_workers=workers)]
    assert [len(b) for b in found] == [4, 2]
    assert torch.equal(torch.cat([b.dequantize() for b in found]), table.dequantize())
