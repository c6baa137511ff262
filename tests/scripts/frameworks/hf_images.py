"""Hugging Face image classification: with_transform over a column of pictures, a Trainer, a collate function."""

import csv
import os
import random

import numpy as np
import torch
from datasets import Dataset, Image
from seen import Seen, whose
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


def aug(image):
    image = image.resize((96, 72))
    x, y = random.randint(0, 32), random.randint(0, 8)
    image = image.crop((x, y, x + 64, y + 64))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def preprocess_train(example_batch):
    """Apply train transforms across a batch."""
    example_batch["pixel_values"] = [aug(image.convert("RGB")) for image in example_batch["image"]]
    del example_batch["image"]
    return example_batch


def collate_fn(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    labels = torch.tensor([example["label"] for example in examples])
    return {"pixel_values": pixel_values, "labels": labels}


class Net(nn.Module):
    seen = Seen()

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 10))

    def forward(self, pixel_values, labels):
        self.seen.add(whose(pixel_values), labels, drawn=pixel_values)
        logits = self.net(pixel_values)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main():
    set_seed(7)
    root = os.environ["DATA"]
    rows = list(csv.DictReader(open(os.path.join(root, "labels.csv"))))
    columns = {"image": [os.path.join(root, r["path"]) for r in rows], "label": [int(r["label"]) for r in rows]}
    train_ds = Dataset.from_dict(columns).cast_column("image", Image()).with_transform(preprocess_train)
    args = TrainingArguments(
        output_dir="out", per_device_train_batch_size=16, num_train_epochs=3, dataloader_num_workers=1, report_to=[],
        save_strategy="no", use_cpu=True, remove_unused_columns=False, disable_tqdm=True, seed=7,
    )  # fmt: skip
    Trainer(model=Net(), args=args, train_dataset=train_ds, data_collator=collate_fn).train()
    Net.seen.epoch("three epochs")
    Net.seen.end()


if __name__ == "__main__":
    main()
