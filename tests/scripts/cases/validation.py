"""Train, validate each epoch, test at the end: the validation set is the same each time, to the bit."""

import csv
import os
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image, ImageEnhance
from seen import Seen, whose
from torch import nn
from torch.utils.data import DataLoader, Dataset

cfg = SimpleNamespace(root=os.environ["DATA"], bs=16, epochs=3, size=64, workers=2, seed=17)


class ImageDataset(Dataset):
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

    def __init__(self, split):
        rows = list(csv.reader(open(f"{cfg.root}/labels.csv")))[1:]
        self.rows = {"train": rows[:80], "val": rows[80:112], "test": rows[112:]}[split]
        self.split = split

    def __len__(self):
        return len(self.rows)

    def load_image(self, path):
        return Image.open(os.path.join(cfg.root, path)).convert("RGB").resize((cfg.size, cfg.size))

    def normalize(self, x):
        return (x - self.mean[:, None, None]) / self.std[:, None, None]

    def __getitem__(self, i):
        path, label = self.rows[i]
        img = self.load_image(path)
        if self.split == "train":
            img = ImageEnhance.Sharpness(img).enhance(0.5 + float(torch.rand(1)))
        x = torch.from_numpy(np.asarray(img).transpose(2, 0, 1).copy()).float() / 255
        return self.normalize(x), torch.tensor(int(label))


def colours(x):
    return x * ImageDataset.std[:, None, None] + ImageDataset.mean[:, None, None]


@torch.no_grad()
def evaluate(net, loader, seen, name):
    net.eval()
    right = 0
    for x, y in loader:
        seen.add(whose(colours(x)), y, x)
        right += (net(x).argmax(1) == y).sum().item()
    seen.epoch(name)
    print(f"~ {name} accuracy {right / len(loader.dataset):.2f}")


def main():
    torch.manual_seed(cfg.seed)
    sets = {k: ImageDataset(k) for k in ("train", "val", "test")}
    train = DataLoader(sets["train"], cfg.bs, shuffle=True, num_workers=cfg.workers, persistent_workers=True)
    val, test = (DataLoader(sets[k], cfg.bs, num_workers=1) for k in ("val", "test"))
    net = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    net(torch.zeros(2, 3, cfg.size, cfg.size))
    opt = torch.optim.SGD(net.parameters(), 0.01)
    seen = {k: Seen() for k in sets}
    for _ in range(cfg.epochs):
        net.train()
        for x, y in train:
            seen["train"].add(whose(colours(x)), y, drawn=x)
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
        seen["train"].epoch("train")
        evaluate(net, val, seen["val"], "val")
    evaluate(net, test, seen["test"], "test")
    seen["train"].end()


if __name__ == "__main__":
    main()
