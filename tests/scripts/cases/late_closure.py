"""A closure over the loop's variable, a function attribute as a knob, and a transform that is exchanged in mid-training."""

import os
import random

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):
    def __init__(self, root, transform):
        self.files = sorted(os.path.join(root, f) for f in os.listdir(root))
        self.transform = transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        x = np.array(Image.open(self.files[i]).convert("RGB").resize((64, 64)))
        return self.transform(x), i


def strength(x):
    x = torch.from_numpy(x).permute(2, 0, 1).float() / 255
    return x * strength.factor + strength.factor * random.random() * 0


strength.factor = 1.0


def main():
    torch.manual_seed(1)
    random.seed(1)
    root = os.path.join(os.environ["DATA"], "photos")
    seen = Seen()
    epoch = 0
    by_epoch = Photos(root, lambda x: (torch.from_numpy(x).permute(2, 0, 1), epoch, random.random()))
    loader = DataLoader(by_epoch, 16, shuffle=True, num_workers=2)
    for epoch in range(4):
        for (x, e, r), i in loader:
            seen.add(whose(x), i, e, drawn=r)
        seen.epoch()
    knob = Photos(root, strength)
    loader = DataLoader(knob, 16, shuffle=True, num_workers=2)
    for epoch in range(4):
        if epoch == 2:
            strength.factor = 0.5
        if epoch == 3:
            knob.transform = lambda x: torch.from_numpy(x).permute(2, 0, 1).float() / 255 * 0.25
        for x, i in loader:
            seen.add(whose(x / {0: 1, 1: 1, 2: 0.5, 3: 0.25}[epoch]), i, (x * 100).round())
        seen.epoch()


if __name__ == "__main__":
    main()
