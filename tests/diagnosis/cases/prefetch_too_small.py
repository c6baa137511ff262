import time

from planted import Rows
from torch.utils.data import DataLoader


class Data(Rows):
    def __getitem__(self, i):
        time.sleep(0.001)
        return super().__getitem__(i)


if __name__ == "__main__":
    loader = DataLoader(Data(4000), batch_size=16, num_workers=2, prefetch_factor=1)
    for step, batch in enumerate(loader):
        time.sleep(0.08 if step % 8 == 0 else 0.001)
