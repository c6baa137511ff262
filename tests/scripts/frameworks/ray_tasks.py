"""A sweep: two learning rates at once, each a task of Ray, so loaders are made in processes that Ray starts."""

import contextlib
import io
import os
import random

import numpy as np
import ray
import torch
from PIL import Image
from seen import Seen, whose
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):
    def __init__(self, folder):
        self.paths = [os.path.join(folder, n) for n in sorted(os.listdir(folder))]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, idx):
        img = Image.open(self.paths[idx]).convert("RGB").resize((96, 72))
        x, y = random.randint(0, 32), random.randint(0, 8)
        img = np.asarray(img.crop((x, y, x + 64, y + 64)))
        return torch.tensor(img).permute(2, 0, 1) / 255, int(os.path.basename(self.paths[idx])[:4]) % 10


@ray.remote(num_cpus=1)
def train(lr, folder):
    torch.manual_seed(3)
    loader = DataLoader(Photos(folder), batch_size=16, shuffle=True, num_workers=1)
    model = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 10))
    opt = torch.optim.SGD(model.parameters(), lr)
    seen, log = Seen(), io.StringIO()
    with contextlib.redirect_stdout(log):
        for _ in range(3):
            for x, y in loader:
                seen.add(whose(x), y, drawn=x)
                opt.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                opt.step()
            seen.epoch(f"lr {lr}, epoch")
        seen.end()
    return log.getvalue()


def main():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    folder = os.path.join(os.environ["DATA"], "photos")
    for log in ray.get([train.remote(lr, folder) for lr in (1e-2, 1e-3)]):
        print(log, end="")
    ray.shutdown()


if __name__ == "__main__":
    main()
