"""Lightning with two processes (ddp on the CPU, each with the sampler that Lightning puts in) and two train loaders."""

import os

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from PIL import Image
from seen import Seen, whose
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        image = Image.open(self.names[i]).convert("RGB").resize((64, 48))
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (x.flip(2) if torch.rand(()) < 0.5 else x), i


class Pairs(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 5, 4), nn.Flatten(), nn.Linear(4 * 11 * 15, 8))
        self.a, self.b = Seen(), Seen()

    def training_step(self, batch, batch_idx):
        (x, i), (y, j) = batch["a"], batch["b"]
        self.a.add(whose(x), i, drawn=x)
        self.b.add(whose(y), j, drawn=y)
        return F.mse_loss(self.net(x).mean(0), self.net(y).mean(0))

    def on_train_epoch_end(self):
        for turn in range(self.trainer.world_size):
            self.trainer.strategy.barrier()
            if turn == self.global_rank:
                self.a.epoch(f"a, rank {turn},")
                self.b.epoch(f"b, rank {turn},")
        self.trainer.strategy.barrier()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


def loaders():
    folder = os.path.join(os.environ["DATA"], "photos")
    names = [os.path.join(folder, n) for n in sorted(os.listdir(folder))]
    a = DataLoader(Photos(names[:64]), batch_size=8, shuffle=True, num_workers=1)
    b = DataLoader(Photos(names[64:112]), batch_size=8, shuffle=True, num_workers=1)
    return CombinedLoader({"a": a, "b": b}, mode="min_size")


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(29, workers=True)
    trainer = L.Trainer(max_epochs=3, accelerator="cpu", strategy="ddp", devices=2, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    model = Pairs()
    trainer.fit(model, train_dataloaders=loaders())
    if trainer.global_rank == 0:
        model.a.end()
        model.b.end()
