"""A stream that comes once an epoch, shared out among two workers by itself. Nothing can be gained."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Events(IterableDataset):
    def __init__(self, n=24_000):
        self.n = n

    def __iter__(self):
        info = get_worker_info()
        step, begin = (info.num_workers, info.id) if info else (1, 0)
        rng = random.Random(torch.initial_seed())
        for i in range(begin, self.n, step):
            words = " ".join(str(rng.randrange(1000)) for _ in range(60)).split()
            yield torch.tensor([int(w) for w in words]), i % 10


def main():
    torch.manual_seed(0)
    loader = DataLoader(Events(), batch_size=64, num_workers=2)
    net = nn.Sequential(nn.EmbeddingBag(1000, 32), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters())
    print("begin", flush=True)
    for epoch in range(5):
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
