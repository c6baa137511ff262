"""kornia: an AugmentationSequential of single pictures in the dataset, behind a decoding that is always the same."""

import os

import kornia.augmentation as K
import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):
    def __init__(self, folder):
        self.files = sorted(os.path.join(folder, f) for f in os.listdir(folder))
        self.preprocess = nn.Sequential(K.Resize((72, 96)), K.CenterCrop((64, 80)))
        self.augment = K.AugmentationSequential(
            K.RandomHorizontalFlip(p=0.5), K.RandomCrop((56, 56)), data_keys=["input"]
        )

    def __len__(self):
        return len(self.files)

    @torch.no_grad()
    def __getitem__(self, i):
        x = torch.from_numpy(np.array(Image.open(self.files[i]).convert("RGB"))).permute(2, 0, 1).float() / 255
        x = self.preprocess(x)
        return self.augment(x)[0], i % 10


def main():
    torch.manual_seed(11)
    torch.set_num_threads(1)
    loader = DataLoader(Photos(os.path.join(os.environ["DATA"], "photos")), batch_size=16, shuffle=True, num_workers=2)
    net = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 13 * 13, 10))
    opt = torch.optim.SGD(net.parameters(), 0.01)
    seen = Seen()
    for _ in range(3):
        for x, y in loader:
            seen.add(whose(x), y, drawn=x)
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
        seen.epoch()
    seen.end()


if __name__ == "__main__":
    main()
