"""A dataset that logs and counts what it reads. The counts are the script's own, without workers."""

import logging
import os
import time
from collections import Counter

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset

logger = logging.getLogger("data")


class Logged(Dataset):
    def __init__(self, root):
        self.root = root
        self.names = sorted(os.listdir(root))
        self.reads = Counter()
        self.seconds = 0.0

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        began = time.perf_counter()
        name = self.names[i]
        self.reads[name] += 1
        logger.info("read %s for the %d. time", name, self.reads[name])
        image = Image.open(os.path.join(self.root, name)).resize((64, 64))
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        self.seconds += time.perf_counter() - began
        return (x.flip(2) if np.random.rand() < 0.5 else x), self.reads[name]


if __name__ == "__main__":
    logging.basicConfig(filename="reads.log", level=logging.INFO, format="%(message)s")
    np.random.seed(22)
    torch.manual_seed(22)
    dataset = Logged(os.path.join(os.environ["DATA"], "photos"))
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    seen = Seen()
    for epoch in range(3):
        for x, count in loader:
            seen.add(whose(x), drawn=x)
            assert (count == epoch + 1).all(), "a sample that was read another time than it says"
        seen.epoch()
    seen.end()
    print("reads:", sum(dataset.reads.values()), set(dataset.reads.values()))
    logging.shutdown()
    print("logged:", len(open("reads.log").readlines()))
