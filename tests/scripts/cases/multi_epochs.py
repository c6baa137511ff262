"""A loader whose workers stay for all epochs: the batch sampler repeats itself, and one iterator serves them all."""

import os

import numpy as np
import torch
import torch.utils.data
from PIL import Image
from seen import Seen, whose


class MultiEpochsDataLoader(torch.utils.data.DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        if self.batch_sampler is None:
            self.sampler = _RepeatSampler(self.sampler)
        else:
            self.batch_sampler = _RepeatSampler(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.sampler) if self.batch_sampler is None else len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class _RepeatSampler:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class ImageDataset(torch.utils.data.Dataset):
    def __init__(self, root):
        self.reader = sorted(e.path for e in os.scandir(root))
        self.transform = None

    def __getitem__(self, index):
        img = Image.open(self.reader[index]).convert("RGB")
        if self.transform is not None:
            img = self.transform(img)
        return img, index % 10

    def __len__(self):
        return len(self.reader)


class RandomResizedCrop:
    def __init__(self, size, scale=(0.4, 1.0)):
        self.size, self.scale = size, scale

    def __call__(self, img):
        side = int(min(img.size) * float(torch.empty(1).uniform_(*self.scale).sqrt()))
        x, y = (int(torch.randint(0, n - side + 1, (1,))) for n in img.size)
        img = img.resize((self.size, self.size), box=(x, y, x + side, y + side))
        return torch.from_numpy(np.array(img)).permute(2, 0, 1)


def main():
    torch.manual_seed(24)
    dataset = ImageDataset(os.path.join(os.environ["DATA"], "photos"))
    dataset.transform = RandomResizedCrop(48)
    loader = MultiEpochsDataLoader(dataset, batch_size=16, shuffle=True, num_workers=2)
    seen = Seen()
    for _ in range(4):
        for x, y in loader:
            seen.add(whose(x), y, drawn=x)
        seen.epoch()
    seen.end()


if __name__ == "__main__":
    main()
