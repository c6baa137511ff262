"""Records of one binary file that stays open, without workers: each read moves the file's position."""

import os
import struct

import numpy as np
import torch
from seen import Seen
from torch.utils.data import DataLoader, Dataset

SIZE = 4 + 256 * 4


class Records(Dataset):
    def __init__(self, path):
        self.file = open(path, "rb")
        self.file.seek(0, os.SEEK_END)
        self.count = self.file.tell() // SIZE

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        self.file.seek(i * SIZE)
        (number,) = struct.unpack("<i", self.file.read(4))
        values = np.frombuffer(self.file.read(SIZE - 4), "<f4").copy()
        if np.random.random() < 0.5:
            values = -values
        return torch.from_numpy(values), number


def main():
    np.random.seed(2)
    torch.manual_seed(2)
    data = Records(os.path.join(os.environ["DATA"], "records.bin"))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    net = torch.nn.Linear(256, 1)
    opt = torch.optim.SGD(net.parameters(), 1e-3)
    seen = Seen()
    for _ in range(4):
        data.file.seek(12)
        for values, number in loader:
            seen.add(number, values.abs(), drawn=values)
            opt.zero_grad()
            net(values).square().mean().backward()
            opt.step()
        seen.epoch()
        # the script's own use of the file, between epochs
        here = data.file.tell()
        print("position is that of a record's end:", here % SIZE == 0)
    seen.end()


if __name__ == "__main__":
    main()
