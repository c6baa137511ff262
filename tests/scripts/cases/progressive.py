"""Progressive resizing: the size of the pictures grows from epoch to epoch."""

import os

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch import nn
from torch.utils.data import DataLoader, Dataset


class ResizingDataset(Dataset):
    def __init__(self, folder, size):
        self.folder, self.size = folder, size
        self.names = sorted(os.listdir(folder))

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        im = Image.open(os.path.join(self.folder, self.names[i]))
        im = im.resize((self.size, self.size), Image.BICUBIC)
        x = torch.from_numpy(np.array(im)).permute(2, 0, 1).float() / 255
        if torch.rand(1).item() < 0.5:
            x = x.flip(-1)
        return x, i % 10


def main():
    torch.manual_seed(5)
    dataset = ResizingDataset(os.path.join(os.environ["DATA"], "photos"), 32)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)
    seen = Seen()
    for epoch, size in enumerate([32, 32, 48, 48, 64, 32]):
        dataset.size = size
        for x, y in loader:
            both = torch.maximum(x, x.flip(3))  # the same whether it was flipped or not
            seen.add(whose(x), y, both, [tuple(x.shape[1:])] * len(x), drawn=x)
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        seen.epoch(f"size {size}, epoch")
    print("~ last loss", loss.item())
    seen.end()


if __name__ == "__main__":
    main()
