"""Photographs with OpenCV and albumentations; 1 worker, 5 epochs."""

import csv
import os

import albumentations as A
import cv2
import torch
from albumentations.pytorch import ToTensorV2
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROOT = os.environ.get("PHOTOS", "examples/data")


class Photos(Dataset):
    def __init__(self, tf, limit=3200):
        self.rows = list(csv.DictReader(open(ROOT + "/labels.csv")))[:limit]
        self.tf = tf

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        r = self.rows[i]
        im = cv2.cvtColor(cv2.imread(ROOT + "/" + r["path"]), cv2.COLOR_BGR2RGB)
        return self.tf(image=im)["image"], int(r["label"])


def train(dataset, workers=1, epochs=5):
    torch.manual_seed(0)
    loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=workers, drop_last=True)
    head = [nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 17)]
    net = nn.Sequential(nn.Conv2d(3, 8, 5, 4), *head)
    opt = torch.optim.SGD(net.parameters(), 1e-2)
    print("begin", flush=True)
    for epoch in range(epochs):
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)


KEPT = [A.Resize(160, 160)]
DRAWN = [A.RandomCrop(128, 128), A.HorizontalFlip(), A.Normalize(), ToTensorV2()]

if __name__ == "__main__":
    train(Photos(A.Compose(KEPT + DRAWN)))
