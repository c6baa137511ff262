import time

import torch
from planted import CORES, Rows
from torch.utils.data import DataLoader


class Sharpen(torch.nn.Module):
    def forward(self, x):
        for _ in range(12):
            x = torch.nn.functional.conv1d(x.view(1, 1, -1), torch.ones(1, 1, 63) / 63, padding=31).view(-1)
        return x


class Data(Rows):
    def __init__(self, n):
        super().__init__(n)
        self.transform = torch.nn.Sequential(torch.nn.ReLU(), Sharpen())

    def __getitem__(self, i):
        with torch.no_grad():
            return self.transform(torch.full((8192,), float(i)))[:64].clone()


if __name__ == "__main__":
    loader = DataLoader(Data(1200), batch_size=8, num_workers=CORES)
    for batch in loader:
        time.sleep(0.002)
