"""Hugging Face's Trainer that reports to what it is told. Prints the history of its logs, and what MLflow and W&B have."""

import json
import sys

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from stoker.integrations.transformers import StokerCallback


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"x": torch.full((4,), float(i)), "labels": torch.tensor(float(i % 2))}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        out = self.layer(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


def main(report_to):
    args = TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, num_train_epochs=2, logging_steps=4, report_to=report_to,
        save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(model=Model(), args=args, train_dataset=Rows(), callbacks=[StokerCallback()])
    trainer.train()
    found = {"history": trainer.state.log_history}
    if "mlflow" in report_to:
        import mlflow

        found["mlflow"] = dict(mlflow.last_active_run().data.metrics)
    if "wandb" in report_to:
        import wandb

        found["wandb"] = {k: v for k, v in dict(wandb.run.summary).items() if "data/" in k}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
