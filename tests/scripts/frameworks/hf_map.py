"""Hugging Face datasets: map once, with_format("torch"), a plain loader and a loop of one's own."""

import csv
import os

import torch
from datasets import Dataset, disable_progress_bars
from seen import Seen
from torch import nn
from torch.utils.data import DataLoader

disable_progress_bars()


def main():
    torch.manual_seed(5)
    with open(os.path.join(os.environ["DATA"], "texts.csv"), newline="") as f:
        rows = list(csv.DictReader(f))
    raw = Dataset.from_list([{"text": r["text"], "labels": int(r["label"])} for r in rows])

    def encode(batch):
        ids = [[int(w[1:]) + 1 for w in t.split()][:48] for t in batch["text"]]
        return {"input_ids": [x + [0] * (48 - len(x)) for x in ids]}

    tokenized = raw.map(encode, batched=True, remove_columns=["text"]).with_format("torch")
    split = tokenized.train_test_split(test_size=0.25, seed=0)
    train = DataLoader(split["train"], batch_size=16, shuffle=True, num_workers=2)
    test = DataLoader(split["test"], batch_size=32)
    model = nn.Sequential(nn.EmbeddingBag(501, 16, padding_idx=0), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen, checked = Seen(), Seen()
    for _ in range(3):
        for batch in train:
            seen.add(batch["labels"], batch["input_ids"])
            loss = nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seen.epoch("train")
        for batch in test:
            checked.add(batch["labels"], batch["input_ids"])
        checked.epoch("test")


if __name__ == "__main__":
    main()
