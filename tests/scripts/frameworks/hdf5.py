"""h5py: the file is opened in the worker that needs it first."""

import os

import h5py
import numpy as np
import torch
from seen import Seen
from torch import nn
from torch.utils.data import DataLoader, Dataset


class H5Dataset(Dataset):
    def __init__(self, path, crop=28):
        self.path, self.crop, self.h5 = path, crop, None
        with h5py.File(path, "r") as f:
            self.length = len(f["volumes"])

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.h5 is None:
            self.h5 = h5py.File(self.path, "r")
        volume = self.h5["volumes"][index].astype(np.float32)
        a, b, c = np.random.randint(0, 40 - self.crop + 1, 3)
        return torch.from_numpy(volume[a:, b:, c:][: self.crop, : self.crop, : self.crop].copy())[None], index


def seed(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)


def main():
    torch.manual_seed(17)
    source = os.path.join(os.environ["DATA"], "volumes")
    with h5py.File("volumes.h5", "w") as f:
        f["volumes"] = np.stack([np.load(os.path.join(source, n)) for n in sorted(os.listdir(source))])
    loader = DataLoader(H5Dataset("volumes.h5"), batch_size=4, shuffle=True, num_workers=2, worker_init_fn=seed)
    net = nn.Sequential(nn.Conv3d(1, 2, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, 1))
    opt = torch.optim.SGD(net.parameters(), 1e-9)
    seen = Seen()
    for _ in range(4):
        for x, index in loader:
            seen.add(index, (x.amin((1, 2, 3, 4)) // 1000).long(), drawn=x)
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
        seen.epoch()
    seen.end()


if __name__ == "__main__":
    main()
