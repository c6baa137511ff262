"""The workloads: datasets and what a consumer does with a batch. Importable by a spawned worker."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

ROOT = Path(__file__).parent.parent
SAMPLE = (3, 224, 224)
BATCH_BYTES = 256 * 3 * 224 * 224 * 4


class Big(Dataset):
    """transport: 64 samples in turn that cost nothing to make, so only moving them counts."""

    def __init__(self) -> None:
        self.base = torch.randn(64, *SAMPLE)

    def __len__(self) -> int:
        return 256 * 24

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.base[i & 63]


class Tiny(Dataset):
    """overhead: a scalar, so only what a loader adds to a batch counts."""

    def __init__(self, batches: int = 2000) -> None:
        self.n = 64 * batches

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(i)


class Sized(Dataset):
    """growth: samples of any size that cost nothing to make."""

    def __init__(self, nbytes: int, n: int) -> None:
        self.base = torch.ones(max(1, nbytes // 4))
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.base


class Uneven(Dataset):
    """stragglers: 5 % of samples, the same ones each time, take 20 ms, the others 1."""

    def __init__(self, n: int) -> None:
        self.slow = (torch.rand(n, generator=torch.Generator().manual_seed(0)) < 0.05).tolist()

    def __len__(self) -> int:
        return len(self.slow)

    def __getitem__(self, i: int) -> int:
        time.sleep(0.02 if self.slow[i] else 0.001)
        return i


class Distant(Dataset):
    """resize: a sample takes 3 ms to arrive, on however many cores, and has random numbers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(0.003)
        return torch.cat([torch.tensor([float(i)]), torch.rand(100)])


class Table(Dataset):
    """memory: one number of a small dict."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> int:
        return int(self.rows[i]["y"])


class Endless(Dataset):
    """shuffle: as many samples as asked for, each its own index."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        return i


class Leaves(Dataset):
    """leaves: what a detection set gives, 120 small tensors and one image a sample."""

    def __init__(self, batches: int) -> None:
        self.n = 32 * batches

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        sample = {f"field {k}": torch.full((4,), float(i + k)) for k in range(120)}
        sample["image"] = torch.full((3, 64, 64), float(i))
        return sample


class Ragged(Dataset):
    """ragged: a text and a list of any length, left as they are."""

    def __init__(self, batches: int) -> None:
        self.n = 64 * batches

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"text": "word " * (i % 30), "ids": list(range(i % 40))}


def as_it_is(samples: list[Any]) -> list[Any]:
    """ragged's collate function."""
    return samples


class Photos(Dataset):
    """jpeg: the demo's photographs, decoded, resized, cropped and flipped as the demo does."""

    def __init__(self, folder: Path) -> None:
        with open(folder / "labels.csv", newline="") as file:
            self.rows = [(folder / r["path"], int(r["label"])) for r in csv.DictReader(file)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        path, label = self.rows[i]
        image = Image.open(path).convert("RGB").resize((128, 96)).crop((32, 16, 96, 80))
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (x.flip(2) if torch.rand(()) < 0.5 else x), label


def photos() -> Path:
    """The folder of photographs; ``make demo`` or ``examples/make_photos.py`` makes it."""
    for folder in (ROOT / "examples" / "data", ROOT / "benchmarks" / "data"):
        if (folder / "labels.csv").is_file():
            return folder
    raise FileNotFoundError("no photographs: python examples/make_photos.py --out benchmarks/data --count 4000")


def touch(batch: Any) -> int:
    """What a consumer does at least: one float of each page of a large tensor, one of a small. Returns the samples."""
    if isinstance(batch, dict):
        batch = batch["image"]
    x = batch[0] if isinstance(batch, (list, tuple)) else batch
    if isinstance(x, dict):
        return len(batch)
    if x.nbytes > 4096:
        x.reshape(-1)[::1024].sum()
    else:
        x[0]
    return len(x)
