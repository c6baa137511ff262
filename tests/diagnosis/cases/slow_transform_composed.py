import time

from planted import CORES, Rows, burn
from torch.utils.data import DataLoader


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for t in self.transforms:
            x = t(x)
        return x


class Flip:
    def __call__(self, x):
        return x.flip(0)


class Blur:
    def __call__(self, x):
        burn(2)
        return x


class Data(Rows):
    def __init__(self, n):
        super().__init__(n)
        self.transform = Compose([Flip(), Blur(), Flip()])

    def __getitem__(self, i):
        return self.transform(super().__getitem__(i))


if __name__ == "__main__":
    loader = DataLoader(Data(2000), batch_size=8, num_workers=CORES)
    for batch in loader:
        time.sleep(0.002)
