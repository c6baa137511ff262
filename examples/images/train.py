"""Classifies pictures in one folder per class, with transforms as torchvision has them."""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class Resize:
    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        return image.resize((self.size, self.size), Image.Resampling.BILINEAR)


class RandomHorizontalFlip:
    def __call__(self, image):
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


class RandomBrightness:
    def __call__(self, image):
        return ImageEnhance.Brightness(image).enhance(random.uniform(0.8, 1.2))


def to_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


class ImageFolder(Dataset):
    def __init__(self, root, transform):
        classes = sorted(path.name for path in root.iterdir())
        self.samples = [(path, k) for k, name in enumerate(classes) for path in sorted((root / name).iterdir())]
        self.transform = transform

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        return self.transform(Image.open(path).convert("RGB")), label


def make_pictures(root, count):
    """Stripes, one direction for each class."""
    y, x = np.mgrid[:384, :512]
    for i in range(count):
        angle, noise = i % 6 * np.pi / 6, np.random.default_rng(i).normal(0, 40, (384, 512, 3))
        stripes = 127 + 90 * np.sin((x * np.cos(angle) + y * np.sin(angle)) / (6 + i % 7))
        path = root / f"direction-{i % 6}" / f"{i:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((stripes[..., None] + noise).clip(0, 255).astype("uint8")).save(path, quality=90)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--count", type=int, default=900, help="pictures")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    if not args.data.exists():
        make_pictures(args.data, args.count)
    random.seed(0)
    torch.manual_seed(0)
    data = ImageFolder(args.data, Compose([Resize(64), RandomHorizontalFlip(), RandomBrightness(), to_tensor]))
    train, valid = random_split(data, [0.8, 0.2])
    train_loader = DataLoader(train, batch_size=32, shuffle=True, num_workers=2)
    valid_loader = DataLoader(valid, batch_size=64, num_workers=2)
    body = [nn.Conv2d(3, 16, 5, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    net = nn.Sequential(*body, nn.Flatten(), nn.Linear(32, 6))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for epoch in range(args.epochs):
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = sum((net(images).argmax(1) == labels).sum().item() for images, labels in valid_loader)
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, right {right} of {len(valid)}", flush=True)


if __name__ == "__main__":
    main()
