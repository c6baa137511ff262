"""Small records here and there in a file that has just been written, so no epoch has them from a disk."""

import os
import tempfile
import time

from cold_cache import RECORDS, SIZE, Records
from torch.utils.data import DataLoader

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = os.path.join(folder, "records.bin")
        with open(path, "wb") as f:
            f.write(os.urandom(RECORDS * SIZE))
        loader = DataLoader(Records(path), batch_size=4, num_workers=2, persistent_workers=True)
        for epoch in range(2):
            for batch in loader:
                time.sleep(0.05)
