"""Classes whose source is hard to come by: __getitem__ behind a decorator, and a class made by exec."""

import functools
import os
import random
import textwrap
import time

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset

ROOT = os.path.join(os.environ["DATA"], "photos")


def timed(fn):
    @functools.wraps(fn)
    def wrapper(self, *args, **kwargs):
        began = time.perf_counter()
        try:
            return fn(self, *args, **kwargs)
        finally:
            self.spent += time.perf_counter() - began

    return wrapper


class Decorated(Dataset):
    def __init__(self):
        self.names, self.spent = sorted(os.listdir(ROOT)), 0.0

    def __len__(self):
        return len(self.names)

    @timed
    def __getitem__(self, i):
        image = Image.open(os.path.join(ROOT, self.names[i])).resize((80, 60))
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        k = random.randint(0, 16)
        return x[:, :, k : k + 64], i


TEMPLATE = """
class {name}(Decorated):
    def __getitem__(self, i):
        image = Image.open(os.path.join(ROOT, self.names[i])).resize((80, 60))
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return (x.flip(2) if torch.rand(1) < 0.5 else x), i
"""
exec(textwrap.dedent(TEMPLATE.format(name="Generated")))


def main():
    random.seed(28)
    torch.manual_seed(28)
    for cls in (Decorated, Generated):  # noqa: F821
        loader = DataLoader(cls(), batch_size=16, shuffle=True, num_workers=2)
        seen = Seen()
        for _ in range(3):
            for x, i in loader:
                seen.add(whose(x), i, drawn=x)
            seen.epoch(cls.__name__)
        seen.end()


if __name__ == "__main__":
    main()
