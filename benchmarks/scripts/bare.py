"""What the random part alone allows: ``python bare.py SCRIPT WORKERS [its arguments]``.

The scripts of this folder with what is the same in every epoch made beforehand, kept in the process' memory, and the
rest as the script has it. Written by hand, for each as whoever knows it best would.
"""

import sys

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset


class Kept(Dataset):
    """Samples whose first part is made already.

    Args:
        rows: made.
        rest: what is done to one of them each time.
    """

    def __init__(self, rows, rest):
        self.rows, self.rest = rows, rest

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rest(self.rows[i])


def photos(limit):
    from pil_compose import Compose, Photos, RandomCrop, RandomHorizontalFlip, Resize, ToTensor

    rows = list(Photos(Resize(160), limit))
    draw = Compose([RandomCrop(128), RandomHorizontalFlip(), ToTensor()])
    return Kept(rows, lambda row: (draw(row[0]), row[1]))


def pil_compose(workers):
    from pil_compose import train

    train(photos(1600), workers)


def ranks(workers):
    from ranks import train

    train(photos(3000), workers)


def albumentations_cv2(workers):
    import albumentations as A
    from albumentations_cv2 import DRAWN, KEPT, Photos, train

    head, tail = A.Compose(KEPT), A.Compose(DRAWN)
    rows = [(head(image=image)["image"], label) for image, label in Photos(lambda image: {"image": image})]
    train(Kept(rows, lambda row: (tail(image=row[0])["image"], row[1])), workers)


def lightning_module(workers):
    from lightning_module import PhotoModule, train
    from pil_compose import Compose, Photos, Resize, ToTensor

    class Ready(PhotoModule):
        def setup(self, stage):
            self.workers = workers
            self.train = photos(1200)
            self.val = Kept(list(Photos(Compose([Resize(128), ToTensor()]), 400)), lambda row: row)

    train(Ready())


def hf_trainer(workers):
    from hf_trainer import texts, tokenize, train

    lines = texts()
    made = tokenize({"text": lines, "label": [i % 2 for i in range(len(lines))]})
    rows = [dict(zip(made, row, strict=True)) for row in zip(*made.values(), strict=True)]
    train(Kept(rows, lambda row: row), workers)


def monai_dict(workers):
    from monai.data import CacheDataset
    from monai_dict import files, train, transforms

    train(CacheDataset(files() * 16, transforms(), num_workers=1, progress=False), workers)


def mosaic(workers):
    from mosaic import MosaicDataset, train

    class Ready(MosaicDataset):
        def __init__(self):
            super().__init__()
            self.made = [super(Ready, self).load_image(i) for i in range(len(self))]

        def load_image(self, i):
            return self.made[i]

    train(Ready(), workers)


def train_lazy(workers):
    import train_lazy as demo

    lazy, loader = demo.Photos, demo.DataLoader

    def ready(folder):
        rows = []
        for path, label in lazy(folder).rows:
            image = Image.open(path).convert("RGB").resize((128, 96)).crop((32, 16, 96, 80))
            rows.append((torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255, label))
        return Kept(rows, lambda row: (row[0].flip(2) if torch.rand(()) < 0.5 else row[0], row[1]))

    demo.Photos = ready
    demo.DataLoader = lambda data, num_workers, **rest: loader(data, num_workers=workers, **rest)
    demo.main()


if __name__ == "__main__":
    name, workers = sys.argv[1:3]
    del sys.argv[1:3]
    globals()[name](int(workers))
