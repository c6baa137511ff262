"""Lightning Fabric: one's own loop, the loaders set up by Fabric."""

import csv
import os

import numpy as np
import torch
from lightning.fabric import Fabric, seed_everything
from PIL import Image
from seen import Seen, whose
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):
    def __init__(self, root):
        self.root = root
        self.table = list(csv.DictReader(open(os.path.join(root, "labels.csv"))))

    def __len__(self):
        return len(self.table)

    def __getitem__(self, i):
        image = Image.open(os.path.join(self.root, self.table[i]["path"])).convert("RGB").resize((64, 48))
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        if torch.rand(1) < 0.5:
            x = x.flip(2)
        return x + 0.01 * torch.randn_like(x), int(self.table[i]["label"])


def main():
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    seed_everything(2, workers=True)
    model = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 11 * 15, 10))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.01))
    loader = fabric.setup_dataloaders(DataLoader(Photos(os.environ["DATA"]), 16, shuffle=True, num_workers=1))
    seen = Seen()
    for _ in range(3):
        for x, y in loader:
            seen.add(whose(x), y, drawn=x)
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        seen.epoch()
    seen.end()


if __name__ == "__main__":
    main()
