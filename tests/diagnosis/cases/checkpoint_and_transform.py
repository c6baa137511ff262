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
        return self.transform(super().__getitem__(i))


if __name__ == "__main__":
    for step, batch in enumerate(DataLoader(Data(1600), batch_size=8, num_workers=CORES)):
        time.sleep(0.002)
        if step % 25 == 24:
            time.sleep(0.3)
