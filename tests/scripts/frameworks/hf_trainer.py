"""Hugging Face: a Trainer over a Dataset whose set_transform tokenises texts, the same each time."""

import csv
import os
import re

import torch
from datasets import Dataset
from seen import Seen
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

rows = list(csv.DictReader(open(os.path.join(os.environ["DATA"], "texts.csv"), newline="")))
ds = Dataset.from_dict({"text": [r["text"] for r in rows], "label": [int(r["label"]) for r in rows]})
vocab = {f"w{i}": i + 2 for i in range(500)}


def tokenize(batch):
    ids = [[vocab.get(t, 1) for t in re.findall(r"\w+", x.lower())][:64] for x in batch["text"]]
    ids = [x + [0] * (64 - len(x)) for x in ids]
    mask = [[int(t > 0) for t in x] for x in ids]
    return {"input_ids": ids, "attention_mask": mask, "labels": batch["label"]}


class Writer(Trainer):
    seen = Seen()

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen.add(inputs["labels"], inputs["input_ids"], inputs["attention_mask"])
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        if not model.training:
            checked.add(inputs["labels"], inputs["input_ids"])
        return super().compute_loss(model, inputs, *args, **kwargs)


checked = Seen()


def main():
    set_seed(4)
    split = ds.train_test_split(test_size=64, seed=1)
    for part in split.values():
        part.set_transform(tokenize)
    size = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = BertForSequenceClassification(BertConfig(vocab_size=502, num_labels=4, **size))
    args = TrainingArguments(
        output_dir="out", per_device_train_batch_size=16, per_device_eval_batch_size=16, num_train_epochs=3, seed=4,
        dataloader_num_workers=int(os.environ.get("WORKERS", 0)), report_to=[], save_strategy="no", use_cpu=True,
        remove_unused_columns=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = Writer(model=model, args=args, train_dataset=split["train"], eval_dataset=split["test"])
    trainer.train()
    Writer.seen.epoch("three epochs of training")
    metrics = trainer.evaluate()
    checked.epoch("evaluation")
    print("~", metrics["eval_loss"], torch.get_num_threads())


if __name__ == "__main__":
    main()
