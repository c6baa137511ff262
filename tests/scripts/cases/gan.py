"""A GAN between two folders: two loaders zipped, of different lengths."""

import itertools
import os

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Domain(Dataset):
    def __init__(self, names, flip):
        self.names, self.flip = names, flip

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        img = Image.open(self.names[i]).convert("RGB").resize((48, 48), Image.LANCZOS)
        x = torch.from_numpy(np.array(img)).permute(2, 0, 1) / 127.5 - 1
        if self.flip and torch.rand(1) < 0.5:
            x = torch.flip(x, [2])
        return x + 0.001 * torch.randn(3, 1, 1)


def main():
    torch.manual_seed(16)
    photos = os.path.join(os.environ["DATA"], "photos")
    names = [os.path.join(photos, n) for n in sorted(os.listdir(photos))]
    loader_a = DataLoader(Domain(names[:72], True), batch_size=12, shuffle=True, num_workers=1, drop_last=True)
    loader_b = DataLoader(Domain(names[72:], False), batch_size=12, shuffle=True, num_workers=1, drop_last=True)
    g = nn.Conv2d(3, 3, 3, padding=1)
    d = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.LeakyReLU(0.2), nn.Flatten(), nn.LazyLinear(1))
    d(torch.zeros(1, 3, 48, 48))
    opt_g, opt_d = (torch.optim.Adam(m.parameters(), 2e-4, betas=(0.5, 0.999)) for m in (g, d))
    seen_a, seen_b = Seen(), Seen()
    for _ in range(3):
        for real_a, real_b in zip(loader_a, itertools.islice(loader_b, 10)):
            seen_a.add(whose((real_a + 1) / 2), drawn=real_a)
            seen_b.add(whose((real_b + 1) / 2), drawn=real_b)
            fake = g(real_a)
            loss_d = nn.functional.softplus(-d(real_b)).mean() + nn.functional.softplus(d(fake.detach())).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            loss_g = nn.functional.softplus(-d(fake)).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
        seen_a.epoch("A")
        seen_b.epoch("B")
    seen_a.end()
    seen_b.end()


if __name__ == "__main__":
    main()
