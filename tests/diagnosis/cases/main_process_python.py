import time

from planted import Rows, burn
from torch.utils.data import DataLoader


class Data(Rows):
    def __getitem__(self, i):
        burn(2)
        return super().__getitem__(i)


if __name__ == "__main__":
    loader = DataLoader(Data(1000), batch_size=8)
    for batch in loader:
        time.sleep(0.01)
