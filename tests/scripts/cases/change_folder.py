"""Goes to the data's folder and names files from there; nests its Dataset class in a function."""

import os
import random

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset

start = os.getcwd()
os.chdir(os.environ["DATA"])


def make_dataset(size):
    class Images(Dataset):
        files = sorted(os.listdir("photos"))

        def __len__(self):
            return len(self.files)

        def __getitem__(self, i):
            img = Image.open(f"photos/{self.files[i]}").convert("RGB").resize(size)
            angle = random.choice((0, 180)) + random.uniform(-1, 1)
            return torch.from_numpy(np.array(img.rotate(angle))[8:-8, 8:-8]).permute(2, 0, 1), i

    return Images()


random.seed(20)
torch.manual_seed(20)
dataset = make_dataset((96, 72))
for n_workers in (0, 2):
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=n_workers)
    seen = Seen()
    for epoch in range(3):
        for x, i in loader:
            seen.add(i, (torch.tensor(whose(x)) - i).abs() <= 1, drawn=x)
        seen.epoch(f"{n_workers} workers, epoch")
    seen.end()
os.chdir(start)
with open("out.txt", "w") as f:
    f.write("done\n")
print(os.path.exists("out.txt"), os.listdir(os.environ["DATA"] + "/photos")[:0])
