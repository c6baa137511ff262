"""Lightning: a DataModule that makes its loaders when it is asked, a Trainer that fits and validates."""

import os
import random
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from seen import Seen, whose
from torch import nn
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

    def __call__(self, img):
        x, y = random.randint(0, img.width - self.size), random.randint(0, img.height - self.size)
        return img.crop((x, y, x + self.size, y + self.size))


def resize(img):
    return img.resize((96, 72))


def to_tensor(img):
    return torch.from_numpy(np.array(img)).permute(2, 0, 1).float() / 255


class PhotoDataset(Dataset):
    def __init__(self, files, transform):
        self.files, self.transform = files, transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return self.transform(Image.open(self.files[i]).convert("RGB")), i % 10


class PhotoData(L.LightningDataModule):
    def __init__(self, root, batch_size=16):
        super().__init__()
        self.root, self.batch_size = Path(root), batch_size

    def setup(self, stage):
        files = sorted((self.root / "photos").iterdir())
        self.train = PhotoDataset(files[:96], Compose([resize, RandomCrop(64), to_tensor]))
        self.val = PhotoDataset(files[96:], Compose([resize, to_tensor]))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, num_workers=1)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size, num_workers=1)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)
        )
        self.seen, self.checked = Seen(), Seen()

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.add(whose(x), y, drawn=x)
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.checked.add(whose(x), y, x)
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def on_train_epoch_end(self):
        self.seen.epoch("train")

    def on_validation_epoch_end(self):
        self.checked.epoch("val")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(1, workers=True)
    trainer = L.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, num_sanity_val_steps=0)  # fmt: skip
    model = Classifier()
    trainer.fit(model, datamodule=PhotoData(os.environ["DATA"]))
    model.seen.end()
    print("~ val_loss", float(trainer.callback_metrics["val_loss"]))
