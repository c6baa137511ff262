"""Two datasets put together, split at random, the two parts with transforms of their own through Subset."""

import os
import random

import numpy as np
import torch
from PIL import Image, ImageOps
from seen import Seen, whose
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, random_split

ROOT = os.environ["DATA"]


def to_tensor(im):
    return torch.as_tensor(np.asarray(im).copy()).permute(2, 0, 1)


def augment(im):
    im = ImageOps.mirror(im) if random.random() > 0.5 else im
    k = random.randrange(32)
    return to_tensor(im.crop((k, k // 2, k + 96, k // 2 + 96)))


def plain(im):
    return to_tensor(im.crop((16, 8, 112, 104)))


class Folder(Dataset):
    def __init__(self, names, transform):
        self.names, self.transform = names, transform

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        with Image.open(self.names[i]) as im:
            im = im.convert("RGB").resize((144, 108))
        return self.transform(im), i


def build(transform):
    names = [os.path.join(ROOT, "photos", n) for n in sorted(os.listdir(os.path.join(ROOT, "photos")))]
    return ConcatDataset([Folder(names[:80], transform), Folder(names[80:], transform)])


def main():
    torch.manual_seed(3)
    random.seed(3)
    train_part, val_part = random_split(range(128), [96, 32], generator=torch.Generator().manual_seed(42))
    train, val = Subset(build(augment), train_part.indices), Subset(build(plain), val_part.indices)
    train_loader = DataLoader(train, 16, shuffle=True, num_workers=2, drop_last=True)
    val_loader = DataLoader(val, 32, num_workers=1)
    seen, checked = Seen(), Seen()
    for _ in range(3):
        for x, i in train_loader:
            seen.add(whose(x), i, drawn=x)
        seen.epoch("train")
        with torch.no_grad():
            for x, i in val_loader:
                checked.add(whose(x), i, x)
        checked.epoch("val")
    seen.end()


if __name__ == "__main__":
    main()
