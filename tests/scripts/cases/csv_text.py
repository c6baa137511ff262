"""Texts of a CSV file, tokenised each time they are asked for. Nothing is random but the order."""

import csv
import os
import re
from collections import Counter

import torch
from seen import Seen
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Vocab:
    def __init__(self, texts):
        counts = Counter(w for t in texts for w in self.split(t))
        self.index = {w: i + 2 for i, (w, _) in enumerate(counts.most_common(400))}

    @staticmethod
    def split(text):
        return re.findall(r"[a-z]+\d*", text.lower())

    def encode(self, text):
        return [self.index.get(w, 1) for w in self.split(text)]

    def __len__(self):
        return len(self.index) + 2


class ReviewDataset(Dataset):
    def __init__(self, path, max_len=64):
        with open(path, newline="") as f:
            self.items = list(csv.DictReader(f))
        self.vocab = Vocab([r["text"] for r in self.items])
        self.max_len = max_len

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        row = self.items[i]
        ids = self.vocab.encode(row["text"])[: self.max_len]
        return torch.tensor(ids, dtype=torch.long), int(row["label"])


def collate(samples):
    ids, labels = zip(*samples, strict=True)
    return pad_sequence(ids, batch_first=True), torch.tensor([len(x) for x in ids]), torch.tensor(labels)


def main():
    torch.manual_seed(7)
    train = ReviewDataset(os.path.join(os.environ["DATA"], "texts.csv"))
    loader = DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate, num_workers=0)
    model = nn.Sequential(nn.EmbeddingBag(len(train.vocab), 16, padding_idx=0), nn.Linear(16, 4))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    seen = Seen()
    for _ in range(3):
        for ids, lengths, labels in loader:
            seen.add([tuple(x[:n].tolist()) for x, n in zip(ids, lengths, strict=True)], labels)
            loss = nn.functional.cross_entropy(model(ids), labels)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        seen.epoch()
    print(f"~ loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
