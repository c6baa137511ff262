"""Accelerate: prepare() of a model, an optimizer and two loaders, gather_for_metrics in the evaluation."""

import os
import random

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from PIL import Image
from seen import Seen, whose
from torch import nn
from torch.utils.data import DataLoader, Dataset


class PetsDataset(Dataset):
    def __init__(self, file_names, image_transform=None):
        self.file_names = file_names
        self.image_transform = image_transform

    def __len__(self):
        return len(self.file_names)

    def __getitem__(self, idx):
        fname = self.file_names[idx]
        raw_image = Image.open(fname)
        image = raw_image.convert("RGB")
        if self.image_transform is not None:
            image = self.image_transform(image)
        return {"image": image, "label": int(os.path.basename(fname)[:4]) % 10}


def train_tfm(image):
    image = image.resize((96, 72))
    x, y = random.randint(0, 32), random.randint(0, 8)
    return torch.from_numpy(np.array(image.crop((x, y, x + 64, y + 64)))).permute(2, 0, 1) / 255


def eval_tfm(image):
    return torch.from_numpy(np.array(image.resize((64, 64)))).permute(2, 0, 1) / 255


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(3)
    folder = os.path.join(os.environ["DATA"], "photos")
    names = [os.path.join(folder, n) for n in sorted(os.listdir(folder))]
    train = DataLoader(PetsDataset(names[:96], train_tfm), shuffle=True, batch_size=16, num_workers=1)
    test = DataLoader(PetsDataset(names[96:], eval_tfm), shuffle=False, batch_size=16, num_workers=1)
    model = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    seen, checked = Seen(), Seen()
    for _ in range(3):
        model.train()
        for batch in train:
            seen.add(whose(batch["image"]), batch["label"], drawn=batch["image"])
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        seen.epoch("train")
        model.eval()
        for batch in test:
            with torch.no_grad():
                outputs = model(batch["image"]).argmax(dim=-1)
            accelerator.gather_for_metrics((outputs, batch["label"]))
            checked.add(whose(batch["image"]), batch["label"], batch["image"])
        checked.epoch("eval")
    seen.end()


if __name__ == "__main__":
    main()
