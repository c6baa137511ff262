"""Parts of parts of datasets of several classes, side by side in one StackDataset, and split at random."""

import os

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, TensorDataset, random_split


class Files(Dataset):
    def __init__(self, root, flip):
        self.paths = sorted(os.path.join(root, p) for p in os.listdir(root))
        self.flip = flip

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, k):
        image = Image.open(self.paths[k]).convert("RGB").resize((64, 64))
        x = torch.from_numpy(np.array(image).transpose(2, 0, 1))
        return x.flip(-1) if self.flip and torch.rand(1).item() > 0.5 else x


class Bright(Files):
    def __getitem__(self, k):
        x = super().__getitem__(k)
        noise = torch.randint(0, 2, x.shape, dtype=torch.uint8)
        return x + noise


class Masks(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, k):
        return torch.full((4, 4), k % 2), np.random.randint(3)


if __name__ == "__main__":
    torch.manual_seed(5)
    np.random.seed(5)
    root = os.path.join(os.environ["DATA"], "photos")
    a, b = Files(root, True), Bright(root, False)
    both = ConcatDataset(
        [
            Subset(a, range(0, 128, 2)),
            Subset(Subset(b, range(1, 128)), range(0, 127, 2)),
            ConcatDataset([Subset(a, [0, 1])]),
        ]
    )
    numbers = TensorDataset(torch.arange(len(both)))
    stacked = StackDataset(image=both, number=numbers, mask=Masks(len(both)))
    train, val = random_split(stacked, [0.75, 0.25], torch.Generator().manual_seed(1))
    loader = DataLoader(train, 16, shuffle=True, num_workers=2)
    test = DataLoader(val, 16)
    seen = Seen()
    for _ in range(3):
        for batch in loader:
            seen.add(whose(batch["image"]), batch["number"][0], batch["mask"][0], drawn=batch["image"])
        seen.epoch()
        for batch in test:
            seen.add(whose(batch["image"]), batch["number"][0], batch["mask"][0])
        seen.epoch("val")
    seen.end()
