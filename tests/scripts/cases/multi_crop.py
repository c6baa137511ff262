"""DINO's multi-crop: a class that keeps transforms under three names, and random erasing with a NumPy Generator."""

import os
import random

import numpy as np
import torch
from PIL import Image, ImageFilter
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for t in self.transforms:
            x = t(x)
        return x


class RandomCrop:
    def __init__(self, size):
        self.size = size

    def __call__(self, im):
        x, y = random.randint(0, im.width - self.size), random.randint(0, im.height - self.size)
        return im.crop((x, y, x + self.size, y + self.size))


class Resize:
    def __init__(self, size):
        self.size = size

    def __call__(self, im):
        return im.resize(self.size)


class GaussianBlur:
    def __init__(self, p):
        self.p = p

    def __call__(self, im):
        return im.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2))) if random.random() <= self.p else im


class ToTensor:
    def __call__(self, im):
        return torch.from_numpy(np.array(im)).permute(2, 0, 1).float() / 255


class RandomErasing:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __call__(self, x):
        top, left = self.rng.integers(0, x.shape[1] - 8, 2)
        x[1, top : top + 8, left : left + 8] = 0
        return x


class DataAugmentationDINO:
    def __init__(self, local_crops_number):
        normalize = Compose([ToTensor(), RandomErasing(3)])
        self.global_transfo1 = Compose([Resize((128, 96)), RandomCrop(64), normalize])
        self.global_transfo2 = Compose([Resize((128, 96)), RandomCrop(64), GaussianBlur(0.1), normalize])
        self.local_crops_number = local_crops_number
        self.local_transfo = Compose([Resize((128, 96)), RandomCrop(32), GaussianBlur(0.5), normalize])

    def __call__(self, image):
        crops = []
        crops.append(self.global_transfo1(image))
        crops.append(self.global_transfo2(image))
        for _ in range(self.local_crops_number):
            crops.append(self.local_transfo(image))
        return crops


class ImageFolder(Dataset):
    def __init__(self, root, transform=None):
        self.samples = [(os.path.join(root, f), k % 10) for k, f in enumerate(sorted(os.listdir(root)))]
        self.loader, self.transform = lambda path: Image.open(path).convert("RGB"), transform

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, target = self.samples[index]
        sample = self.loader(path)
        if self.transform is not None:
            sample = self.transform(sample)
        return sample, target


if __name__ == "__main__":
    random.seed(0)
    torch.manual_seed(0)
    data = ImageFolder(os.path.join(os.environ["DATA"], "photos"), DataAugmentationDINO(3))
    loader = DataLoader(data, 16, shuffle=True, num_workers=2)
    seen = Seen()
    for _ in range(4):
        for crops, y in loader:
            seen.add([k % 10 for k in whose(crops[0])], y, [len(crops)] * len(y), drawn=crops[2])
        seen.epoch()
    seen.end()
