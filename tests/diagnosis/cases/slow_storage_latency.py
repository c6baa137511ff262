import time

from planted import CORES, Rows
from torch.utils.data import DataLoader


class Data(Rows):
    """A disk that takes its time."""

    def __getitem__(self, i):
        time.sleep(0.005)
        return super().__getitem__(i)


if __name__ == "__main__":
    loader = DataLoader(Data(1600), batch_size=8, num_workers=CORES)
    for batch in loader:
        time.sleep(0.002)
