"""Two ranks under torchrun, each with its share of a dataset that is shuffled anew each epoch."""

import csv
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from seen import Seen, whose
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Photos(Dataset):
    def __init__(self, root, transform):
        self.root, self.transform = root, transform
        with open(os.path.join(root, "labels.csv")) as f:
            self.rows = list(csv.DictReader(f))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        image = Image.open(os.path.join(self.root, row["path"])).convert("RGB").resize((96, 72))
        return self.transform(image), int(row["label"])


def crop(image, n=56):
    x, y = random.randint(0, image.width - n), random.randint(0, image.height - n)
    return torch.from_numpy(np.array(image.crop((x, y, x + n, y + n)))).permute(2, 0, 1).float() / 255


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    dataset = Photos(os.environ["DATA"], crop)
    sampler = DistributedSampler(dataset, shuffle=True, seed=25)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=1)
    net = DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.Flatten(), nn.Linear(8 * 13 * 13, 10)))
    opt = torch.optim.SGD(net.parameters(), 0.01)
    seen = Seen()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            seen.add(whose(x), y, drawn=x)
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
        for turn in range(dist.get_world_size()):  # one after the other, so that lines have an order
            dist.barrier()
            if turn == rank:
                seen.epoch(f"rank {rank}, epoch")
        dist.barrier()
    for turn in range(dist.get_world_size()):
        dist.barrier()
        if turn == rank:
            seen.end()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
