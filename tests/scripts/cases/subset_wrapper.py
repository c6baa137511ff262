"""A dataset around another one that adds a transform, as forum answers recommend it for splits."""

import csv
import pathlib

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset, random_split


class PhotoFolder(Dataset):
    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.entries = list(csv.reader((self.root / "labels.csv").open()))[1:]

    def __getitem__(self, idx):
        name, label = self.entries[idx]
        return Image.open(self.root / name).convert("RGB"), int(label)

    def __len__(self):
        return len(self.entries)


class TransformedSubset(Dataset):
    def __init__(self, subset, transform=None):
        self.subset = subset
        self.transform = transform

    def __getitem__(self, index):
        x, y = self.subset[index]
        if self.transform:
            x = self.transform(x)
        return x, y

    def __len__(self):
        return len(self.subset)


def train_transform(img):
    img = img.resize((100, 75))
    left = int(torch.randint(0, 36, (1,)))
    top = int(torch.randint(0, 11, (1,)))
    return torch.from_numpy(np.array(img.crop((left, top, left + 64, top + 64)))).permute(2, 0, 1) / 255.0


def val_transform(img):
    return torch.from_numpy(np.array(img.resize((64, 64)))).permute(2, 0, 1) / 255.0


if __name__ == "__main__":
    import os

    torch.manual_seed(12)
    full = PhotoFolder(os.environ["DATA"])
    a, b = random_split(full, [0.75, 0.25])
    loaders = {
        "train": DataLoader(TransformedSubset(a, train_transform), batch_size=12, shuffle=True, num_workers=2),
        "val": DataLoader(TransformedSubset(b, val_transform), batch_size=12, num_workers=2),
    }
    seen = {phase: Seen() for phase in loaders}
    for epoch in range(3):
        for phase in ("train", "val"):
            for inputs, labels in loaders[phase]:
                seen[phase].add(whose(inputs), labels, drawn=inputs if phase == "train" else None)
            seen[phase].epoch(phase)
    seen["train"].end()
