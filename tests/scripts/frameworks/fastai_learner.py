"""fastai: its own DataLoader, which calls torch's iterator classes itself, in DataLoaders for a Learner."""

import os
import random

import numpy as np
import torch
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback  # noqa: F401  (gives a Learner its no_bar)
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from PIL import Image
from seen import Seen, whose
from torch import nn


class Photos:
    def __init__(self, files, train):
        self.files, self.train = files, train

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image = Image.open(self.files[i]).convert("RGB").resize((80, 60))
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        shift = random.randint(0, 16) if self.train else 8
        return x[:, :, shift : shift + 64].contiguous(), torch.tensor(i % 10)


class Writer(Callback):
    def __init__(self):
        self.train, self.valid = Seen(), Seen()

    def before_batch(self):
        if self.training:
            self.train.add(whose(self.x), self.y, drawn=self.x)
        else:
            self.valid.add(whose(self.x), self.y, self.x)

    def after_train(self):
        self.train.epoch("train")

    def after_validate(self):
        self.valid.epoch("valid")


def main():
    random.seed(13)
    np.random.seed(13)
    torch.manual_seed(13)
    folder = os.path.join(os.environ["DATA"], "photos")
    files = [os.path.join(folder, n) for n in sorted(os.listdir(folder))]
    train = DataLoader(Photos(files[:96], True), bs=16, shuffle=True, num_workers=2, drop_last=True)
    valid = DataLoader(Photos(files[96:], False), bs=16, num_workers=0)
    net = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))
    writer = Writer()
    learn = Learner(DataLoaders(train, valid, device="cpu"), net, loss_func=nn.CrossEntropyLoss(), cbs=[writer])
    with learn.no_bar(), learn.no_logging():
        learn.fit(3, 1e-3)
    writer.train.end()


if __name__ == "__main__":
    main()
