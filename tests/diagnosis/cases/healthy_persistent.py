import time

from planted import Rows, burn
from torch.utils.data import DataLoader


class Data(Rows):
    """Many short epochs, with workers that stay."""

    def __getitem__(self, i):
        burn(0.2)
        return super().__getitem__(i)


if __name__ == "__main__":
    loader = DataLoader(Data(160), batch_size=8, num_workers=2, persistent_workers=True)
    for epoch in range(8):
        for batch in loader:
            time.sleep(0.02)
