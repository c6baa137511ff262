"""stoker.share: a list of many small dicts in one buffer, which workers read and do not copy."""

import torch
from torch.utils.data import Dataset

import stoker


class Index(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]["label"]


def main():
    rows = [{"path": f"images/{i:08d}.jpg", "label": i % 10} for i in range(200_000)]
    shared = stoker.share(rows)
    print(shared)
    print(shared[123456], len(shared[1000:2000]), shared[-1] == rows[-1])
    loader = stoker.DataLoader(Index(shared), batch_size=1000, num_workers=2)
    print("labels", int(torch.cat(list(loader)).sum()))


if __name__ == "__main__":
    main()
