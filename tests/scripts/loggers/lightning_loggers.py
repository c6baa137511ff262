"""Lightning with four loggers at once, in one process or in two (ddp). Prints what each of them has afterwards."""

import json
import sys
import time

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch.utils.data import DataLoader, Dataset

from stoker.integrations.lightning import StokerMonitor


class Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.full((4,), float(i))


class Data(L.LightningDataModule):
    def train_dataloader(self):  # made after the callback has begun
        return DataLoader(Slow(), batch_size=4, num_workers=1)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def main(devices):
    loggers = [
        TensorBoardLogger("tensorboard"),
        WandbLogger(project="p", save_dir=".", offline=True),
        MLFlowLogger(tracking_uri="file:mlruns"),
        CSVLogger("csv"),
    ]
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto",
                        logger=loggers, log_every_n_steps=4, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[StokerMonitor()])  # fmt: skip
    trainer.fit(Model(), datamodule=Data())
    if trainer.global_rank == 0:
        mlflow = loggers[2].experiment.get_run(loggers[2].run_id).data
        print(
            json.dumps(
                {
                    "tensorboard": loggers[0].log_dir,
                    "wandb": {k: v for k, v in dict(loggers[1].experiment.summary).items() if k.startswith("data/")},
                    "mlflow": mlflow.metrics,
                    "tags": mlflow.tags,
                    "csv": loggers[3].log_dir,
                }
            )
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
