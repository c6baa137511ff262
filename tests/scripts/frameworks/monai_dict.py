"""MONAI: dictionary transforms of NIfTI volumes and their labels, the random ones last, nothing cached."""

import torch
from monai.data import DataLoader, Dataset
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    LoadImaged,
    Orientationd,
    RandFlipd,
    RandGaussianNoised,
    RandSpatialCropd,
    ScaleIntensityRanged,
)
from monai.utils import set_determinism
from nifti import files
from seen import Seen
from torch import nn


def main():
    set_determinism(seed=8)
    train_transforms = Compose(
        [
            LoadImaged(keys=["image", "label"]),
            EnsureChannelFirstd(keys=["image", "label"]),
            Orientationd(keys=["image", "label"], axcodes="RAS"),
            ScaleIntensityRanged(keys=["image"], a_min=0, a_max=25600, b_min=0.0, b_max=1.0, clip=True),
            RandSpatialCropd(keys=["image", "label"], roi_size=(24, 24, 24), random_size=False),
            RandFlipd(keys=["image", "label"], prob=0.5, spatial_axis=0),
            RandGaussianNoised(keys=["image"], prob=0.5, std=0.0001),
        ]
    )
    train_ds = Dataset(data=files(), transform=train_transforms)
    train_loader = DataLoader(train_ds, batch_size=2, shuffle=True, num_workers=2)
    model = nn.Conv3d(1, 2, 3, padding=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    seen = Seen()
    for _ in range(3):
        for batch_data in train_loader:
            image, label = batch_data["image"].as_tensor(), batch_data["label"].as_tensor()
            number = (image.mean((1, 2, 3, 4)) * 25.6 - 0.5).round().long()
            values = (image * 25600) % 1000  # what the label says of the image: crops and flips have to go together
            agree = ((values > 500) == (label > 0)).float().mean((1, 2, 3, 4)) > 0.95
            seen.add(number, agree, drawn=image)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(image), label[:, 0].long()).backward()
            optimizer.step()
        seen.epoch()
    seen.end()


if __name__ == "__main__":
    main()
