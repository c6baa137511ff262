"""Photographs through a Compose of one's own: decode, shrink, crop, flip."""

import csv
import os
import random

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROOT = os.environ["DATA"]


class Resize:
    def __init__(self, w, h):
        self.size = (w, h)

    def __call__(self, img):
        return img.resize(self.size, Image.BILINEAR)


class RandomCrop:
    def __init__(self, n):
        self.n = n

    def __call__(self, img):
        x, y = random.randint(0, img.width - self.n), random.randint(0, img.height - self.n)
        return img.crop((x, y, x + self.n, y + self.n))


class RandomHorizontalFlip:
    def __call__(self, img):
        return img.transpose(Image.FLIP_LEFT_RIGHT) if random.random() < 0.5 else img


class ToTensor:
    def __call__(self, img):
        return torch.from_numpy(np.array(img)).permute(2, 0, 1).float().div(255)


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, img):
        for t in self.transforms:
            img = t(img)
        return img


class Photos(Dataset):
    def __init__(self, root, transform=None):
        self.root, self.transform = root, transform
        with open(os.path.join(root, "labels.csv")) as f:
            self.samples = [(row["path"], int(row["label"])) for row in csv.DictReader(f)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, target = self.samples[index]
        img = Image.open(os.path.join(self.root, path)).convert("RGB")
        if self.transform is not None:
            img = self.transform(img)
        return img, target


def main():
    torch.manual_seed(0)
    random.seed(0)
    dataset = Photos(ROOT, Compose([Resize(120, 90), RandomCrop(64), RandomHorizontalFlip(), ToTensor()]))
    loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=2)
    net = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    seen = Seen()
    for _ in range(4):
        for images, targets in loader:
            seen.add(whose(images), targets, drawn=images)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), targets)
            loss.backward()
            optimizer.step()
        seen.epoch()
    print(f"~ loss {loss.item():.3f}")
    seen.end()


if __name__ == "__main__":
    main()
