"""MONAI's tutorial of segmentation: patches around positive and negative voxels, two of each volume, and rotations."""

import torch
from monai.data import DataLoader, Dataset, list_data_collate
from monai.transforms import (
    Compose,
    CropForegroundd,
    EnsureChannelFirstd,
    LoadImaged,
    Orientationd,
    RandCropByPosNegLabeld,
    RandRotate90d,
    ScaleIntensityRanged,
    Spacingd,
)
from monai.utils import set_determinism
from nifti import files
from seen import Seen
from torch import nn


def main():
    set_determinism(seed=8)
    keys = ["image", "label"]
    transforms = Compose(
        [
            LoadImaged(keys=keys),
            EnsureChannelFirstd(keys=keys),
            ScaleIntensityRanged(keys=["image"], a_min=0, a_max=25600, b_min=0.0, b_max=1.0, clip=True),
            Orientationd(keys=keys, axcodes="RAS"),
            Spacingd(keys=keys, pixdim=(1.0, 1.0, 1.2), mode=("bilinear", "nearest")),
            CropForegroundd(keys=keys, source_key="image"),
            RandCropByPosNegLabeld(
                keys=keys, label_key="label", spatial_size=(24, 24, 24), pos=1, neg=1, num_samples=2, image_key="image"
            ),
            RandRotate90d(keys=keys, prob=0.5, max_k=3),
        ]
    )
    dataset = Dataset(data=files(), transform=transforms)
    loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=2, collate_fn=list_data_collate)
    model = nn.Conv3d(1, 2, 3, padding=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    seen = Seen()
    for _ in range(3):
        for batch in loader:
            image, label = batch["image"].as_tensor(), batch["label"].as_tensor()
            number = (image.mean((1, 2, 3, 4)) * 25.6 - 0.5).round().long()
            seen.add(number, drawn=image)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(image), label[:, 0].long()).backward()
            optimizer.step()
        seen.epoch()
    seen.end()


if __name__ == "__main__":
    main()
