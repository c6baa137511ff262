"""A stream of lines, shared out among the workers by itself, shuffled in a buffer."""

import csv
import os
import random

import torch
from seen import Seen
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        info = get_worker_info()
        with open(self.path, newline="") as f:
            for k, row in enumerate(csv.reader(f)):
                if k and (info is None or k % info.num_workers == info.id):
                    yield torch.tensor([int(w[1:]) for w in row[0].split()][:30]), int(row[1]), k


class ShuffleBuffer(IterableDataset):
    def __init__(self, source, size):
        self.source, self.size = source, size

    def __iter__(self):
        buffer = []
        for item in self.source:
            buffer.append(item)
            if len(buffer) == self.size:
                yield buffer.pop(random.randrange(len(buffer)))
        random.shuffle(buffer)
        yield from buffer


def train():
    torch.manual_seed(11)
    stream = ShuffleBuffer(Lines(os.path.join(os.environ["DATA"], "texts.csv")), 40)
    loader = DataLoader(stream, batch_size=16, num_workers=2)
    bag = torch.nn.EmbeddingBag(500, 4)
    opt = torch.optim.SGD(bag.parameters(), 0.5)
    seen = Seen()
    for _ in range(4):
        for tokens, label, number in loader:
            seen.add(number, label, tokens)
            opt.zero_grad()
            torch.nn.functional.cross_entropy(bag(tokens), label).backward()
            opt.step()
        seen.epoch()


if __name__ == "__main__":
    train()
