import time

from planted import Rows, burn
from torch.utils.data import DataLoader


class Data(Rows):
    """A few of the files are far larger than the others."""

    def __getitem__(self, i):
        burn(150 if i % 200 == 11 else 0.5)
        return super().__getitem__(i)


if __name__ == "__main__":
    loader = DataLoader(Data(2400), batch_size=8, num_workers=2)
    for batch in loader:
        time.sleep(0.006)
