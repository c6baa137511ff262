"""As many workers as cores, so --apply keeps their number: random augmentation is the same to the bit, epoch by epoch,
whether workers or the script's own process make the batches that come out of the cache."""

import os
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Pictures(Dataset):
    def __init__(self, root):
        self.files = sorted(Path(root, "photos").rglob("*.jpg"))[:48]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image = Image.open(self.files[i]).convert("RGB").resize((256, 256), Image.BICUBIC).resize((64, 64))
        x = torch.from_numpy(np.array(image)).float()
        x = x * random.uniform(0.8, 1.2) + np.random.normal() + torch.randn(3)
        return x, get_worker_info().id


def main():
    torch.manual_seed(0)
    workers = len(os.sched_getaffinity(0))
    loader = DataLoader(Pictures(os.environ["DATA"]), batch_size=4, shuffle=True, num_workers=workers)
    for epoch in range(6):
        total, ids = 0.0, []
        for x, worker in loader:
            total += x.double().sum().item() * (len(ids) + 1) * torch.rand(()).item()
            ids += worker.tolist()
        print(f"epoch {epoch}: {total:.6f} {ids}")


if __name__ == "__main__":
    main()
