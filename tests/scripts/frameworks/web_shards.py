"""webdataset: pictures in tar files, shuffled in a buffer, batched by the pipeline itself."""

import glob
import os
import random

import numpy as np
import torch
import webdataset as wds
from seen import Seen, whose
from torch import nn


def augment(image):
    x = random.randint(0, 40)
    return torch.from_numpy(np.array(image)[:, x : x + 120].copy()).permute(2, 0, 1).float() / 255


def main():
    torch.manual_seed(16)
    random.seed(16)
    shards = sorted(glob.glob(os.path.join(os.environ["DATA"], "shards", "*.tar")))
    dataset = (
        wds.WebDataset(shards, shardshuffle=False, nodesplitter=None, seed=3)
        .shuffle(30)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(augment, int)
        .batched(16)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2)
    net = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))
    opt = torch.optim.SGD(net.parameters(), 0.01)
    seen = Seen()
    for _ in range(3):
        for images, labels in loader:
            labels = torch.as_tensor(labels)
            seen.add(whose(images), labels, drawn=images)
            opt.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            opt.step()
        seen.epoch()
    seen.end()


if __name__ == "__main__":
    main()
