"""Photographs with Pillow and a Compose of one's own; 2 workers, 5 epochs."""

import csv
import os
import random

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROOT = os.environ.get("PHOTOS", "examples/data")


class Resize:
    def __init__(self, n):
        self.n = n

    def __call__(self, im):
        return im.resize((self.n, self.n), Image.BILINEAR)


class RandomHorizontalFlip:
    def __call__(self, im):
        return im.transpose(Image.FLIP_LEFT_RIGHT) if random.random() < 0.5 else im


class RandomCrop:
    def __init__(self, n):
        self.n = n

    def __call__(self, im):
        x, y = random.randint(0, im.width - self.n), random.randint(0, im.height - self.n)
        return im.crop((x, y, x + self.n, y + self.n))


class ToTensor:
    def __call__(self, im):
        return torch.from_numpy(np.array(im)).permute(2, 0, 1).float().div(255)


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for t in self.transforms:
            x = t(x)
        return x


class Photos(Dataset):
    def __init__(self, transform, limit=1600):
        with open(f"{ROOT}/labels.csv") as f:
            self.rows = list(csv.DictReader(f))[:limit]
        self.transform = transform

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        im = Image.open(f"{ROOT}/{row['path']}").convert("RGB")
        return self.transform(im), int(row["label"])


def small_net():
    head = [nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 17)]
    return nn.Sequential(nn.Conv2d(3, 8, 5, 4), *head)


def train(dataset, workers=2, epochs=5):
    torch.manual_seed(0)
    loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=workers, drop_last=True)
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    print("begin", flush=True)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    train(Photos(Compose([Resize(160), RandomCrop(128), RandomHorizontalFlip(), ToTensor()])))
