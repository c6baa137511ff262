"""A collate function that pads, cuts and marks its samples where they lie."""

import csv
import os

import numpy as np
import torch
from seen import Seen
from torch.utils.data import DataLoader, Dataset


class Docs(Dataset):
    def __init__(self, path):
        self.rows = list(csv.DictReader(open(path, newline="")))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = np.array([int(w[1:]) + 1 for w in self.rows[i]["text"].split()], dtype=np.int64)
        return {"ids": ids, "label": int(self.rows[i]["label"]), "meta": {"n": len(ids), "index": i}}


class PadCollator:
    def __init__(self, pad=0, mask=501, p=0.15):
        self.pad, self.mask, self.p = pad, mask, p

    def __call__(self, samples):
        longest = max(s["meta"]["n"] for s in samples)
        for s in samples:
            s["clean"] = s["ids"].copy()
            s["ids"][np.random.rand(len(s["ids"])) < self.p] = self.mask  # in place, as masking often is
            for key in ("ids", "clean"):
                s[key] = np.pad(s[key], (0, longest - len(s[key])), constant_values=self.pad)
            s["meta"]["n"] = -1
        return {
            "ids": torch.from_numpy(np.stack([s["ids"] for s in samples])),
            "clean": torch.from_numpy(np.stack([s["clean"] for s in samples])),
            "index": torch.tensor([s["meta"]["index"] for s in samples]),
        }


if __name__ == "__main__":
    np.random.seed(3)
    torch.manual_seed(3)
    docs = Docs(os.path.join(os.environ["DATA"], "texts.csv"))
    loader = DataLoader(docs, batch_size=16, shuffle=True, collate_fn=PadCollator(), num_workers=2)
    seen = Seen()
    for epoch in range(3):
        for batch in loader:
            clean = [tuple(row[row > 0].tolist()) for row in batch["clean"]]
            drawn = [tuple(row[row > 0].tolist()) for row in batch["ids"]]
            assert all(501 not in words for words in clean), "masked twice"
            seen.add(batch["index"], clean, drawn=drawn)
        seen.epoch()
    seen.end()
