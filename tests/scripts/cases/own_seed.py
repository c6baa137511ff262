"""Each sample draws from a generator made of the epoch and its index: the same everywhere, other in each epoch."""

import os

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset


class Seeded(Dataset):
    def __init__(self, root, seed):
        self.files = sorted(os.path.join(root, f) for f in os.listdir(root))
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image = np.array(Image.open(self.files[i]).convert("RGB").resize((64, 64)))
        rng = np.random.default_rng((self.seed, self.epoch, i))
        image = np.roll(image, rng.integers(64), 1)
        return torch.from_numpy(image).permute(2, 0, 1), i


class Global(Seeded):
    """The same with the process' generator, which is seeded for each sample."""

    def __getitem__(self, i):
        image = np.array(Image.open(self.files[i]).convert("RGB").resize((64, 64)))
        torch.manual_seed(self.seed + 1000 * self.epoch + i)
        image = np.roll(image, int(torch.randint(64, ())), 1)
        return torch.from_numpy(image).permute(2, 0, 1), i


if __name__ == "__main__":
    seen = Seen()
    for kind in (Seeded, Global):
        data = kind(os.path.join(os.environ["DATA"], "photos"), 7)
        loader = DataLoader(data, 16, num_workers=1 if kind is Seeded else 2)
        for epoch in range(5):
            data.set_epoch(epoch)
            for x, i in loader:
                seen.add(whose(x), i, x)
            seen.epoch()
