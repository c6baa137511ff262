"""A dataset that is a dataclass, samples that are dataclasses, and a transform made by functools.partial."""

import csv
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader


@dataclass
class Sample:
    image: torch.Tensor
    label: int
    name: str
    meta: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    path: Path
    label: int


def to_tensor(image, scale):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / scale


def jitter(x, strength, generator=None):
    return (x + strength * torch.randn(1, generator=generator)).clamp(0, 1)


@dataclass
class PhotoDataset:
    root: Path
    size: int = 64
    convert: Callable = field(default_factory=lambda: partial(to_tensor, scale=255))
    augment: Callable = field(default_factory=lambda: partial(jitter, strength=0.01))

    @cached_property
    def records(self):
        with open(self.root / "labels.csv", newline="") as f:
            return [Record(self.root / r["path"], int(r["label"])) for r in csv.DictReader(f)]

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        record = self.records[index]
        image = Image.open(record.path).convert("RGB").resize((self.size, self.size))
        clean = self.convert(image)
        return Sample(clean, record.label, record.path.name), self.augment(clean)


def collate(items):
    samples, views = zip(*items)
    return Sample(
        torch.stack([s.image for s in samples]), torch.tensor([s.label for s in samples]), [s.name for s in samples]
    ), torch.stack(views)


if __name__ == "__main__":
    torch.manual_seed(3)
    loader = DataLoader(PhotoDataset(Path(os.environ["DATA"])), 16, shuffle=True, num_workers=2, collate_fn=collate)
    seen = Seen()
    for _ in range(4):
        for s, views in loader:
            seen.add(whose(s.image), s.label, s.name, s.image, drawn=views)
        seen.epoch()
    seen.end()
