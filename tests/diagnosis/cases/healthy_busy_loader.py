import time

from planted import Rows, burn
from torch.utils.data import DataLoader


class Data(Rows):
    """The workers have much to do, and are in time."""

    def __getitem__(self, i):
        burn(1)
        return super().__getitem__(i)


if __name__ == "__main__":
    loader = DataLoader(Data(1200), batch_size=8, num_workers=2)
    for batch in loader:
        time.sleep(0.03)
