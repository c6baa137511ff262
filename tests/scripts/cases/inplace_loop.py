"""A loop that normalises and erases in the batches it was given; no workers, and batches that alias the samples."""

import os

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, folder):
        self.files = [os.path.join(folder, f) for f in sorted(os.listdir(folder))]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        a = np.asarray(Image.open(self.files[i]).resize((64, 48)), dtype=np.float32)
        return {"x": torch.from_numpy(a.transpose(2, 0, 1) / 255.0), "y": torch.tensor(i % 10)}


def main():
    torch.manual_seed(14)
    pictures = Pictures(os.path.join(os.environ["DATA"], "photos"))
    batches = DataLoader(pictures, batch_size=32, shuffle=True)
    singles = DataLoader(pictures, batch_size=None, num_workers=1)
    seen, one = Seen(), Seen()
    for _ in range(3):
        for batch in batches:
            x, y = batch["x"], batch["y"]
            seen.add(whose(x), y, x)
            x.sub_(0.5).div_(0.25)
            x[:, :, 10:20] = 0
            y.add_(100)
            batch["x"] = None
        seen.epoch()
        for sample in singles:  # a sample as it is: what is written into it must not come again
            one.add(whose(sample["x"][None]), sample["y"][None], sample["x"][None])
            sample["x"].zero_()
            sample["y"].fill_(-1)
            sample.clear()
        one.epoch("single")


if __name__ == "__main__":
    main()
