"""Pictures in a database that the dataset opened when it was made. No workers: a connection is of its thread."""

import io
import os
import sqlite3

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset


class SQLDataset(Dataset):
    def __init__(self, path):
        self.conn = sqlite3.connect(path)
        self.ids = [r[0] for r in self.conn.execute("select id from photos order by id")]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, k):
        cur = self.conn.execute("select label, jpeg from photos where id = ?", (self.ids[k],))
        label, blob = cur.fetchone()
        img = Image.open(io.BytesIO(blob)).resize((80, 60))
        x = torch.from_numpy(np.array(img)).permute(2, 0, 1).contiguous()
        shift = int(torch.randint(0, 17, ()))
        return x[:, :, shift : shift + 64], label


def main():
    torch.manual_seed(8)
    dataset = SQLDataset(os.path.join(os.environ["DATA"], "photos.sqlite"))
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    seen = Seen()
    for _ in range(3):
        for images, labels in loader:
            seen.add(whose(images), labels, drawn=images)
        seen.epoch()
        (n,) = dataset.conn.execute("select count(*) from photos").fetchone()
        print("rows still there:", n)
    seen.end()


if __name__ == "__main__":
    main()
