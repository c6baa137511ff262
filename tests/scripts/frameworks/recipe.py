"""A recipe as torchtune has them: a class with setup and train, packed texts, a StatefulDataLoader, checkpoints."""

import csv
import os
from functools import partial

import torch
from seen import Seen
from torch import nn
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader


class SFTDataset(Dataset):
    def __init__(self, source, tokenizer):
        with open(source, newline="") as f:
            self._data = list(csv.DictReader(f))
        self._tokenizer = tokenizer

    def __len__(self):
        return len(self._data)

    def __getitem__(self, index):
        return self._prepare_sample(self._data[index])

    def _prepare_sample(self, sample):
        tokens = self._tokenizer(sample["text"])
        mask = [k < 5 for k in range(len(tokens))]
        labels = [-100 if m else t for t, m in zip(tokens, mask)]
        return {"tokens": tokens, "labels": labels}


def tokenizer(text):
    return [1, *(int(w[1:]) + 3 for w in text.split()[:60]), 2]


def padded_collate(batch, padding_idx=0, ignore_idx=-100):
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(x["tokens"]) for x in batch], True, padding_idx)
    labels = nn.utils.rnn.pad_sequence([torch.tensor(x["labels"]) for x in batch], True, ignore_idx)
    return {"tokens": tokens.long(), "labels": labels.long()}


class LoRAFinetuneRecipe:
    def setup(self, epochs=3):
        torch.manual_seed(15)
        self.epochs, self.seen = epochs, Seen()
        ds = SFTDataset(os.path.join(os.environ["DATA"], "texts.csv"), tokenizer)
        self.sampler = DistributedSampler(ds, num_replicas=1, rank=0, shuffle=True, seed=0)
        collate = partial(padded_collate, padding_idx=0, ignore_idx=-100)
        self.dataloader = StatefulDataLoader(ds, 8, sampler=self.sampler, collate_fn=collate, drop_last=True)
        self.model = nn.Sequential(nn.Embedding(503, 16), nn.Linear(16, 503))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self):
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            for batch in self.dataloader:
                words = [tuple(x[x > 0].tolist()) for x in batch["tokens"]]
                self.seen.add(words, [int((x != -100).sum()) for x in batch["labels"]])
                logits = self.model(batch["tokens"])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            self.seen.epoch()
            torch.save({"model": self.model.state_dict(), "loader": self.dataloader.state_dict()}, f"epoch{epoch}.pt")


if __name__ == "__main__":
    recipe = LoRAFinetuneRecipe()
    recipe.setup()
    recipe.train()
