"""Mosaics of four photographs through self.load_image, three of them drawn; 2 workers, 5 epochs."""

import csv
import random

import numpy as np
import torch
from PIL import Image
from pil_compose import ROOT, small_net
from torch.utils.data import DataLoader, Dataset


class MosaicDataset(Dataset):
    def __init__(self, size=96, limit=600):
        with open(f"{ROOT}/labels.csv") as f:
            self.samples = [(f"{ROOT}/{r['path']}", int(r["label"])) for r in csv.DictReader(f)][:limit]
        self.size = size

    def __len__(self):
        return len(self.samples)

    def load_image(self, i):
        im = Image.open(self.samples[i][0]).convert("RGB").resize((self.size, self.size), Image.BILINEAR)
        return np.asarray(im)

    def __getitem__(self, index):
        s = self.size
        xc, yc = random.randint(s // 2, s), random.randint(s // 2, s)
        out = np.full((2 * s, 2 * s, 3), 114, np.uint8)
        indices = [index, *random.choices(range(len(self)), k=3)]
        for k, j in enumerate(indices):
            y, x = k // 2 * s, k % 2 * s
            out[y : y + s, x : x + s] = self.load_image(j)
        out = out[yc - s // 2 : yc + s // 2, xc - s // 2 : xc + s // 2]
        return torch.from_numpy(out.transpose(2, 0, 1).copy()), self.samples[index][1]


def train(dataset, workers=2, epochs=5):
    random.seed(0)
    torch.manual_seed(0)
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=workers)
    net = small_net()
    opt = torch.optim.SGD(net.parameters(), 1e-2)
    print("begin", flush=True)
    for epoch in range(epochs):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(net(x.float() / 255), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    train(MosaicDataset())
