"""albumentations and OpenCV, in the way of their tutorials."""

import csv
import os

import albumentations as A
import cv2
import torch
from albumentations.pytorch import ToTensorV2
from seen import Seen, whose
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROOT = os.environ["DATA"]


class CatsVsDogs(Dataset):
    def __init__(self, images_filepaths, transform=None):
        self.images_filepaths = images_filepaths
        self.transform = transform

    def __len__(self):
        return len(self.images_filepaths)

    def __getitem__(self, idx):
        image_filepath, label = self.images_filepaths[idx]
        image = cv2.imread(image_filepath)
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        if self.transform is not None:
            image = self.transform(image=image)["image"]
        return image, label


train_transform = A.Compose(
    [A.SmallestMaxSize(max_size=80), A.RandomCrop(height=64, width=64), A.HorizontalFlip(p=0.5), ToTensorV2()], seed=10
)
val_transform = A.Compose([A.SmallestMaxSize(max_size=80), A.CenterCrop(height=64, width=64), ToTensorV2()])


def main():
    torch.manual_seed(10)
    with open(f"{ROOT}/labels.csv") as f:
        items = [(f"{ROOT}/{r['path']}", int(r["label"])) for r in csv.DictReader(f)]
    loader = DataLoader(CatsVsDogs(items[:96], train_transform), batch_size=16, shuffle=True, num_workers=1)
    val_loader = DataLoader(CatsVsDogs(items[96:], val_transform), batch_size=16, num_workers=1)
    model = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seen, checked = Seen(), Seen()
    for _ in range(3):
        for images, target in loader:
            seen.add(whose(images), target, drawn=images)
            loss = nn.functional.cross_entropy(model(images.float() / 255), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seen.epoch("train")
        for images, target in val_loader:
            checked.add(whose(images), target, images)
        checked.epoch("val")
    seen.end()


if __name__ == "__main__":
    main()
