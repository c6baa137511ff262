import time

from planted import CORES, Rows, burn
from torch.utils.data import DataLoader


def a(x):
    burn(2)
    return x


def b(x):
    burn(2)
    return x


def c(x):
    burn(2)
    return x


def d(x):
    burn(2)
    return x


def e(x):
    burn(2)
    return x


class Compose:
    def __init__(self, *transforms):
        self.transforms = transforms

    def __call__(self, x):
        for t in self.transforms:
            x = t(x)
        return x


class Data(Rows):
    """Five transforms that take as long as each other, and a worker for each core."""

    transform = Compose(a, b, c, d, e)

    def __getitem__(self, i):
        return self.transform(super().__getitem__(i))


if __name__ == "__main__":
    loader = DataLoader(Data(250 * CORES), batch_size=8, num_workers=CORES)
    for batch in loader:
        time.sleep(0.002)
