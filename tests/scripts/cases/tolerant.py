"""Broken files are in the folder: who meets one returns the next sample instead."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset


class RobustDataset(Dataset):
    def __init__(self, folder):
        self.paths = sorted(Path(folder).iterdir())

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, idx):
        try:
            img = Image.open(self.paths[idx]).convert("RGB").resize((72, 54))
            x = torch.from_numpy(np.array(img)).permute(2, 0, 1)
            k = torch.randint(0, 9, (2,)).tolist()
            return x[:, k[1] // 2 : k[1] // 2 + 48, k[0] : k[0] + 64], idx
        except Exception as e:
            if idx == 17:
                print(f"~ skipping {self.paths[idx].name}: {type(e).__name__}", flush=True)
            return self.__getitem__((idx + 1) % len(self))


def main():
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(Path(os.environ["DATA"], "photos").iterdir())[:64]:
            shutil.copy(path, folder)
        for broken in (5, 17, 18, 63):
            Path(folder, f"{broken:04d}.jpg").write_bytes(b"\xff\xd8 this is no picture")
        torch.manual_seed(15)
        loader = DataLoader(RobustDataset(folder), batch_size=16, shuffle=True, num_workers=2)
        seen = Seen()
        for _ in range(3):
            for x, idx in loader:
                seen.add(whose(x), idx, drawn=x)
            seen.epoch()
        seen.end()


if __name__ == "__main__":
    main()
