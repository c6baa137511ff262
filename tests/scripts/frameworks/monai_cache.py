"""MONAI: the same with CacheDataset, as its tutorials have it."""

import torch
from monai.data import CacheDataset, DataLoader, decollate_batch
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, NormalizeIntensityd, RandFlipd, RandSpatialCropd
from monai.utils import set_determinism
from nifti import files
from seen import Seen


def main():
    set_determinism(seed=9)
    transform = Compose(
        [
            LoadImaged(keys=["image", "label"]),
            EnsureChannelFirstd(keys=["image", "label"]),
            RandSpatialCropd(keys=["image", "label"], roi_size=(24, 24, 24), random_size=False),
            RandFlipd(keys=["image", "label"], prob=0.5, spatial_axis=1),
        ]
    )
    dataset = CacheDataset(data=files(), transform=transform, cache_rate=1.0, num_workers=1, progress=False)
    check = CacheDataset(data=files(6), transform=Compose([*transform.transforms[:2], NormalizeIntensityd("image")]),
                         cache_rate=0.5, num_workers=1, progress=False)  # fmt: skip
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=0)
    val_loader = DataLoader(check, batch_size=1, num_workers=1)
    seen, checked = Seen(), Seen()
    for _ in range(3):
        for batch in loader:
            image = batch["image"].as_tensor()
            number = (image.amin((1, 2, 3, 4)) // 1000).long()
            seen.add(number, drawn=image)
        seen.epoch("train")
        for batch in val_loader:
            items = decollate_batch(batch)
            checked.add([len(items)], batch["image"].as_tensor())
        checked.epoch("val")
    seen.end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
