"""Segments pictures: each is cropped and flipped together with its mask."""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    def __init__(self, root, crop=96):
        self.images = sorted((root / "images").glob("*.jpg"))
        self.masks = [root / "masks" / path.with_suffix(".png").name for path in self.images]
        self.crop = crop

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = Image.open(self.images[index]).convert("RGB").resize((192, 144), Image.Resampling.LANCZOS)
        mask = Image.open(self.masks[index]).resize((192, 144), Image.Resampling.NEAREST)
        return self.augment(image, mask)

    def augment(self, image, mask):
        left = random.randint(0, image.width - self.crop)
        top = random.randint(0, image.height - self.crop)
        box = (left, top, left + self.crop, top + self.crop)
        image, mask = image.crop(box), mask.crop(box)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            mask = mask.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255, torch.from_numpy(np.array(mask)).long()


def make_pictures(root, count):
    """A bright disc on a noisy ground."""
    y, x = np.mgrid[:384, :512]
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    for i in range(count):
        rng = np.random.default_rng(i)
        disc = (x - rng.integers(100, 412)) ** 2 + (y - rng.integers(100, 284)) ** 2 < rng.integers(30, 90) ** 2
        pixels = rng.normal(90, 50, (384, 512, 3)) + 70 * disc[..., None]
        Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(root / "images" / f"{i:04d}.jpg", quality=90)
        Image.fromarray(disc.astype("uint8")).save(root / "masks" / f"{i:04d}.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--count", type=int, default=600, help="pictures")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    if not args.data.exists():
        make_pictures(args.data, args.count)
    random.seed(0)
    torch.manual_seed(0)
    loader = DataLoader(Blobs(args.data), batch_size=16, shuffle=True, num_workers=2)
    net = nn.Sequential(nn.Conv2d(3, 8, 7, padding=3), nn.ReLU(), nn.Conv2d(8, 2, 7, padding=3))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for epoch in range(args.epochs):
        right = 0.0
        for images, masks in loader:
            scores = net(images)
            loss = nn.functional.cross_entropy(scores, masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (scores.argmax(1) == masks).float().mean().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, pixels right {right / len(loader):.2%}", flush=True)


if __name__ == "__main__":
    main()
