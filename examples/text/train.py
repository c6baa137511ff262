"""Classifies texts that a tokenizer in Python splits each time they are asked for; batches are padded."""

import argparse
import csv
import random
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]


class WordPiece:
    """Splits a word into its longest known pieces."""

    def __init__(self, pieces):
        self.ids = {piece: i + 2 for i, piece in enumerate(pieces)}

    def word(self, word):
        ids, start = [], 0
        while start < len(word):
            end = len(word)
            while end > start and word[start:end] not in self.ids:
                end -= 1
            if end == start:
                return [1]
            ids.append(self.ids[word[start:end]])
            start = end
        return ids

    def encode(self, text):
        return [i for word in text.lower().split() for i in self.word(word)]


class Reviews(Dataset):
    def __init__(self, path, tokenizer, longest=256):
        with open(path, newline="") as file:
            self.rows = [(row["text"], int(row["label"])) for row in csv.DictReader(file)]
        self.tokenizer, self.longest = tokenizer, longest

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        text, label = self.rows[index]
        return torch.tensor(self.tokenizer.encode(text)[: self.longest]), label


def pad(batch):
    texts, labels = zip(*batch, strict=True)
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor(labels)


def make_texts(path, count):
    """Words of syllables; the two labels prefer different ones."""
    rng = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for i in range(count):
            some = SYLLABLES[:36] if i % 2 else SYLLABLES[24:]
            words = ("".join(rng.choices(some, k=rng.randint(2, 6))) for _ in range(rng.randint(100, 400)))
            rows.writerow([" ".join(words), i % 2])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--count", type=int, default=4000, help="texts")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    path = args.data / "texts.csv"
    if not path.exists():
        make_texts(path, args.count)
    torch.manual_seed(0)
    loader = DataLoader(Reviews(path, WordPiece(SYLLABLES)), batch_size=32, shuffle=True, num_workers=2, collate_fn=pad)
    net = nn.Sequential(nn.EmbeddingBag(len(SYLLABLES) + 2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for epoch in range(args.epochs):
        right = 0
        for texts, labels in loader:
            scores = net(texts)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (scores.argmax(1) == labels).sum().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, right {right} of {len(loader.dataset)}", flush=True)


if __name__ == "__main__":
    main()
