"""A dataset that keeps what it loaded itself; one loader with workers, which lose it, and one without."""

import os

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset


class CachedPhotos(Dataset):
    def __init__(self, root, cache_size=1000):
        self.paths = sorted(os.path.join(root, name) for name in os.listdir(root))
        self.cache_size = cache_size
        self.cache = {}

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        if index in self.cache:
            img = self.cache[index]
        else:
            img = np.array(Image.open(self.paths[index]).convert("RGB").resize((64, 64), Image.BICUBIC))
            if len(self.cache) < self.cache_size:
                self.cache[index] = img
        if np.random.rand() < 0.5:
            img = img[:, ::-1]
        return torch.from_numpy(img.transpose(2, 0, 1).copy()), index


def seed(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)


def main():
    torch.manual_seed(5)
    np.random.seed(5)
    root = os.path.join(os.environ["DATA"], "photos")
    for workers in (2, 0):
        data = CachedPhotos(root)
        loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=workers, worker_init_fn=seed)
        seen = Seen()
        for _ in range(3):
            for x, index in loader:
                seen.add(index, whose(x), drawn=x)
            seen.epoch(f"{workers} workers, epoch")
        seen.end()
        print(len(data.cache), "photographs are held in this process")


if __name__ == "__main__":
    main()
