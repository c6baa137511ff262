"""Everything at module level: the variables of the loops have the names of the datasets' attributes."""

import csv
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset

root = Path(os.environ["DATA"])
with open(root / "labels.csv", newline="") as file:
    rows = list(csv.DictReader(file))


class Photos(Dataset):
    def __init__(self, rows):
        self.images = [root / row["path"] for row in rows]
        self.labels = torch.tensor([int(row["label"]) for row in rows])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, k):
        image = Image.open(self.images[k]).convert("RGB").resize((64, 64))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return (pixels.flip(2) if torch.rand(()) < 0.5 else pixels), self.labels[k]


if __name__ == "__main__":
    torch.manual_seed(4)
    train = DataLoader(Photos(rows[:96]), batch_size=16, shuffle=True, num_workers=1)
    val = DataLoader(Photos(rows[96:]), batch_size=16)
    seen = Seen()
    for epoch in range(4):
        for images, labels in train:
            seen.add(whose(images), labels, drawn=images)
        seen.epoch()
        for images, labels in val:
            seen.add(whose(images), labels, drawn=images)
        seen.epoch("val")
    seen.end()
