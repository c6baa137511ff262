"""An archive that each worker opens for itself, when it is first asked, as people do with HDF5 and zip files."""

import io
import os
import random
import zipfile

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset


class ZipDataset(Dataset):
    def __init__(self, path):
        self.path = path
        self.archive = None
        with zipfile.ZipFile(path) as z:
            self.names = sorted(z.namelist())

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        data = self.archive.read(self.names[index])
        image = Image.open(io.BytesIO(data)).convert("RGB").resize((96, 72))
        left, top = random.randint(0, 32), random.randint(0, 8)
        image = image.crop((left, top, left + 64, top + 64))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), index


if __name__ == "__main__":
    random.seed(1)
    torch.manual_seed(1)
    loader = DataLoader(ZipDataset(os.path.join(os.environ["DATA"], "photos.zip")), 16, True, num_workers=2)
    seen = Seen()
    for epoch in range(4):
        for x, index in loader:
            seen.add(whose(x), index, drawn=x)
        seen.epoch()
    seen.end()
