import time

from planted import CORES, Rows, burn
from torch.utils.data import DataLoader


class Blur:
    def __call__(self, x):
        burn(2)
        return x


class Data(Rows):
    transform = Blur()

    def __getitem__(self, i):
        time.sleep(0.002)
        return self.transform(super().__getitem__(i))


if __name__ == "__main__":
    loader = DataLoader(Data(1600), batch_size=8, num_workers=CORES)
    for batch in loader:
        time.sleep(0.002)
