"""timm's loaders: an ImageDataset over a reader that opens files, fast_collate, RepeatAugSampler, PrefetchLoader."""

import os
import random
from functools import partial

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, img):
        for t in self.transforms:
            img = t(img)
        return img


class RandomResizedCropAndInterpolation:
    def __init__(self, size):
        self.size = (size, size)

    def __call__(self, img):
        side = random.randint(60, 120)
        x, y = random.randint(0, img.width - side), random.randint(0, img.height - side)
        return img.crop((x, y, x + side, y + side)).resize(self.size, random.choice((Image.BILINEAR, Image.BICUBIC)))


class ToNumpy:
    def __call__(self, pil_img):
        return np.rollaxis(np.array(pil_img, dtype=np.uint8), 2)


class ReaderImageFolder:
    def __init__(self, root):
        self.samples = [(os.path.join(root, name), i % 10) for i, name in enumerate(sorted(os.listdir(root)))]

    def __getitem__(self, index):
        path, target = self.samples[index]
        return open(path, "rb"), target

    def __len__(self):
        return len(self.samples)


class ImageDataset(Dataset):
    def __init__(self, reader, transform=None):
        self.reader, self.transform, self.target_transform = reader, transform, None
        self._consecutive_errors = 0

    def __getitem__(self, index):
        img, target = self.reader[index]
        try:
            img = Image.open(img)
        except Exception as e:
            self._consecutive_errors += 1
            if self._consecutive_errors < 50:
                return self.__getitem__((index + 1) % len(self.reader))
            raise e
        self._consecutive_errors = 0

        img = img.convert("RGB")
        if self.transform is not None:
            img = self.transform(img)
        if target is None:
            target = -1
        elif self.target_transform is not None:
            target = self.target_transform(target)
        return img, target

    def __len__(self):
        return len(self.reader)


def fast_collate(batch):
    targets = torch.tensor([b[1] for b in batch], dtype=torch.int64)
    tensor = torch.zeros((len(batch), *batch[0][0].shape), dtype=torch.uint8)
    for i, (array, _) in enumerate(batch):
        tensor[i] += torch.from_numpy(array)
    return tensor, targets


class RepeatAugSampler(Sampler):
    def __init__(self, dataset, num_repeats=3):
        self.dataset, self.num_repeats, self.epoch = dataset, num_repeats, 0

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.epoch)
        indices = torch.randperm(len(self.dataset), generator=g).repeat_interleave(self.num_repeats)
        return iter(indices.tolist()[: len(self)])

    def __len__(self):
        return len(self.dataset)

    def set_epoch(self, epoch):
        self.epoch = epoch


def _worker_init(worker_id, worker_seeding="all"):
    seed = get_worker_info().seed
    np.random.seed(seed % (2**32 - 1))
    random.seed(seed)


class PrefetchLoader:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        previous = None
        for images, target in self.loader:
            if previous is not None:
                yield previous
            previous = images.float().div_(255), target
        yield previous


def create_loader(root, transform, is_training):
    dataset = ImageDataset(ReaderImageFolder(root), transform)
    sampler = RepeatAugSampler(dataset) if is_training else None
    return PrefetchLoader(DataLoader(dataset, 16, sampler=sampler, num_workers=2, collate_fn=fast_collate,
                                     drop_last=is_training, persistent_workers=True,
                                     worker_init_fn=partial(_worker_init, worker_seeding="all")))  # fmt: skip


def main():
    torch.manual_seed(20)
    root = os.path.join(os.environ["DATA"], "photos")
    train = create_loader(root, Compose([RandomResizedCropAndInterpolation(64), ToNumpy()]), True)
    valid = create_loader(root, Compose([ToNumpy()]), False)
    net = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))
    opt, seen, checked = torch.optim.SGD(net.parameters(), 0.01), Seen(), Seen()
    for epoch in range(3):
        train.loader.sampler.set_epoch(epoch)
        for images, target in train:
            seen.add(whose(images), target, drawn=images)
            opt.zero_grad()
            nn.functional.cross_entropy(net(images), target).backward()
            opt.step()
        seen.epoch("train")
        for images, target in valid:
            checked.add(whose(images), target, images)
        checked.epoch("valid")
    seen.end()


if __name__ == "__main__":
    main()
