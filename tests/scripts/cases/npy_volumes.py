"""Volumes in .npy files, of which each sample is a random block."""

import glob
import os

import numpy as np
import torch
import torch.nn as nn
import torch.utils.data as data
from seen import Seen


class VolumeDataset(data.Dataset):
    def __init__(self, pattern, patch_size=(24, 24, 24), patches_per_volume=3):
        self.files = sorted(glob.glob(pattern))
        self.patch_size = patch_size
        self.patches_per_volume = patches_per_volume

    def __len__(self):
        return len(self.files) * self.patches_per_volume

    def _load(self, idx):
        return np.load(self.files[idx]).astype(np.float32)

    def _random_crop(self, vol):
        starts = [np.random.randint(0, s - p + 1) for s, p in zip(vol.shape, self.patch_size, strict=True)]
        return vol[tuple(slice(a, a + p) for a, p in zip(starts, self.patch_size, strict=True))]

    def __getitem__(self, idx):
        vol = self._load(idx % len(self.files))
        patch = self._random_crop(vol)
        if np.random.rand() < 0.5:
            patch = patch[::-1]
        return {"image": torch.from_numpy(patch.copy())[None], "case": idx}


def seed_worker(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)


def train():
    torch.manual_seed(1)
    dataset = VolumeDataset(os.path.join(os.environ["DATA"], "volumes", "*.npy"))
    loader = data.DataLoader(dataset, batch_size=6, shuffle=True, num_workers=2, worker_init_fn=seed_worker)
    model = nn.Sequential(
        nn.Conv3d(1, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 1)
    )
    opt = torch.optim.SGD(model.parameters(), 1e-8)
    seen = Seen()
    for _ in range(3):
        for batch in loader:
            number = (batch["image"].amin((1, 2, 3, 4)) // 1000).long()
            seen.add(batch["case"], number, drawn=batch["image"])
            opt.zero_grad()
            model(batch["image"]).square().mean().backward()
            opt.step()
        seen.epoch()
    seen.end()


if __name__ == "__main__":
    train()
