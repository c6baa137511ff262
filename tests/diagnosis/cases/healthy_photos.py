"""Photographs that are decoded and augmented anew each epoch, by workers that touch more and more of their memory until
they have touched all of it, beside a step that takes longer."""

import io
import random
import time

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class Compose:
    def __init__(self, *transforms):
        self.transforms = transforms

    def __call__(self, x):
        for t in self.transforms:
            x = t(x)
        return x


def resize(image):
    return image.resize((160, 160))


def crop(image):
    x, y = random.randint(0, 32), random.randint(0, 32)
    return image.crop((x, y, x + 128, y + 128))


def flip(image):
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


class Photos(Dataset):
    transform = Compose(resize, crop, flip)

    def __init__(self, n):
        self.n, self.files = n, []
        for seed in range(64):
            file = io.BytesIO()
            Image.effect_noise((256, 192), 20 + seed).convert("RGB").save(file, "JPEG")
            self.files.append(file.getvalue())

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        image = Image.open(io.BytesIO(self.files[i % len(self.files)])).convert("RGB")
        return torch.tensor(self.transform(image).getdata()[0]), i


if __name__ == "__main__":
    loader = DataLoader(Photos(1200), batch_size=16, shuffle=True, num_workers=2)
    for epoch in range(2):
        for batch in loader:
            time.sleep(0.15)
