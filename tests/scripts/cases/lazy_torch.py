"""All in __getitem__, in one go, the draw in its last line."""

import csv
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset

DATA = Path(os.environ["DATA"])


class Photos(Dataset):
    def __init__(self, folder=DATA):
        with open(folder / "labels.csv", newline="") as file:
            self.rows = [(folder / row["path"], int(row["label"])) for row in csv.DictReader(file)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        path, label = self.rows[index]
        image = Image.open(path).convert("RGB").resize((128, 96)).crop((32, 16, 96, 80))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return pixels.flip(2) if torch.rand(()) < 0.5 else pixels, label


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Photos(), batch_size=20, shuffle=True, num_workers=1)
    net = torch.nn.Linear(3 * 64 * 64, 10)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    seen = Seen()
    for epoch in range(4):
        for x, y in loader:
            seen.add(whose(x), y, x + x.flip(3), drawn=x)
            loss = torch.nn.functional.cross_entropy(net(x.flatten(1)), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        seen.epoch()
    seen.end()
