"""Lightning: a DataModule that makes its loaders when asked; 1 worker each, 5 epochs with validation."""

import lightning as L
import torch
from pil_compose import Compose, Photos, RandomCrop, RandomHorizontalFlip, Resize, ToTensor, small_net
from torch import nn
from torch.utils.data import DataLoader


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = small_net()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


class PhotoModule(L.LightningDataModule):
    workers = 1

    def setup(self, stage):
        self.train = Photos(Compose([Resize(160), RandomCrop(128), RandomHorizontalFlip(), ToTensor()]), 1200)
        self.val = Photos(Compose([Resize(128), ToTensor()]), 400)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=64, shuffle=True, num_workers=self.workers)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=64, num_workers=self.workers)


class Progress(L.Callback):
    def on_train_start(self, trainer, module):
        print("begin", flush=True)

    def on_train_epoch_end(self, trainer, module):
        print(f"epoch {trainer.current_epoch + 1}: loss {float(trainer.callback_metrics['loss']):.3f}", flush=True)


def train(data, epochs=5):
    L.seed_everything(1)
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
                        callbacks=[Progress()])  # fmt: skip
    trainer.fit(Classifier(), datamodule=data)


if __name__ == "__main__":
    train(PhotoModule())
