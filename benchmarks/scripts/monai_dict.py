"""MONAI: dictionary transforms of NIfTI volumes, the case that CacheDataset exists for; 1 worker, 5 epochs."""

import os
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from monai.data import DataLoader, Dataset
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    LoadImaged,
    RandFlipd,
    RandSpatialCropd,
    ScaleIntensityd,
    Spacingd,
)
from torch import nn

FOLDER = Path(os.environ.get("VOLUMES", "nii"))


def files(n=24):
    FOLDER.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    out = []
    for i in range(n):
        path = FOLDER / f"{i}.nii.gz"
        if not path.exists():
            volume = (rng.random((64, 64, 48)) * 1000).astype(np.int16)
            nib.save(nib.Nifti1Image(volume, np.eye(4)), path)
        out.append({"image": str(path), "label": i % 2})
    return out


def transforms():
    return Compose(
        [
            LoadImaged("image"),
            EnsureChannelFirstd("image"),
            Spacingd("image", (1.5, 1.5, 1.5)),
            ScaleIntensityd("image"),
            RandSpatialCropd("image", (32, 32, 24), random_size=False),
            RandFlipd("image", 0.5, 0),
        ]
    )


def train(dataset, workers=1, epochs=5):
    torch.manual_seed(0)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
    head = [nn.ReLU(), nn.AdaptiveAvgPool3d(2), nn.Flatten(), nn.Linear(32, 2)]
    net = nn.Sequential(nn.Conv3d(1, 4, 3, 2), *head)
    opt = torch.optim.SGD(net.parameters(), 1e-2)
    print("begin", flush=True)
    for epoch in range(epochs):
        for batch in loader:
            loss = nn.functional.cross_entropy(net(batch["image"]), batch["label"])
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    train(Dataset(files() * 16, transforms()))
