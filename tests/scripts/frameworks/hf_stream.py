"""Hugging Face datasets: a stream of a CSV file in shards, shuffled in a buffer, tokenised as it comes."""

import csv
import os

import torch
from datasets import disable_progress_bars, load_dataset
from seen import Seen
from torch import nn
from torch.utils.data import DataLoader

disable_progress_bars()


def shards(n=4):
    rows = list(csv.reader(open(os.path.join(os.environ["DATA"], "texts.csv"), newline="")))
    for k in range(n):
        with open(f"shard{k}.csv", "w", newline="") as f:
            csv.writer(f).writerows([rows[0], *rows[1 + k :: n]])
    return [os.path.abspath(f"shard{k}.csv") for k in range(n)]


def encode(example):
    ids = [int(w[1:]) for w in example["text"].split()][:30]
    return {"ids": torch.tensor(ids), "label": example["label"]}


def main():
    torch.manual_seed(6)
    stream = load_dataset("csv", data_files={"train": shards()}, split="train", streaming=True)
    stream = stream.shuffle(seed=42, buffer_size=50).map(encode, remove_columns=["text"])
    loader = DataLoader(stream, batch_size=16, num_workers=2)
    bag = nn.EmbeddingBag(500, 4)
    opt = torch.optim.SGD(bag.parameters(), 0.1)
    seen = Seen()
    for epoch in range(3):
        stream.set_epoch(epoch)
        for batch in loader:
            ids = torch.stack(batch["ids"], 1) if isinstance(batch["ids"], list) else batch["ids"]
            seen.add(batch["label"], ids)
            opt.zero_grad()
            nn.functional.cross_entropy(bag(ids), batch["label"]).backward()
            opt.step()
        seen.epoch()


if __name__ == "__main__":
    main()
