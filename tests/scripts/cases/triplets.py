"""Triplets: an anchor, another picture of its class and one of another class, drawn first and then read."""

import csv
import os
import random
from collections import defaultdict

import numpy as np
import torch
from descent import SGD
from PIL import Image
from seen import Seen, whose
from torch import nn
from torch.utils.data import DataLoader, Dataset


class TripletDataset(Dataset):
    def __init__(self, root):
        self.root = root
        with open(os.path.join(root, "labels.csv")) as fh:
            self.items = [(r["path"], int(r["label"])) for r in csv.DictReader(fh)]
        self.by_class = defaultdict(list)
        for k, (_, y) in enumerate(self.items):
            self.by_class[y].append(k)

    def __len__(self):
        return len(self.items)

    def read(self, k):
        im = Image.open(os.path.join(self.root, self.items[k][0])).convert("RGB").resize((64, 64))
        return torch.from_numpy(np.array(im)).permute(2, 0, 1).float().div_(255)

    def __getitem__(self, k):
        y = self.items[k][1]
        positive = random.choice(self.by_class[y])
        negative = random.choice(self.by_class[random.choice([c for c in self.by_class if c != y])])
        return self.read(k), self.read(positive), self.read(negative)


if __name__ == "__main__":
    random.seed(9)
    torch.manual_seed(9)
    loader = DataLoader(TripletDataset(os.environ["DATA"]), 16, shuffle=True, num_workers=2)
    net = nn.Sequential(nn.Conv2d(3, 8, 7, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(8))
    criterion = nn.TripletMarginLoss()
    net(next(iter(loader))[0])
    opt = SGD(net.parameters(), 1e-3)
    seen = Seen()
    for epoch in range(3):
        for a, p, n in loader:
            anchor, positive, negative = whose(a), whose(p), whose(n)
            right = [x % 10 == y % 10 != z % 10 for x, y, z in zip(anchor, positive, negative, strict=True)]
            seen.add(anchor, right, a, drawn=list(zip(positive, negative, strict=True)))
            loss = criterion(net(a), net(p), net(n))
            opt.zero_grad()
            loss.backward()
            opt.step()
        seen.epoch()
    seen.end()
