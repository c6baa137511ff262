import time

from planted import Rows
from torch.utils.data import DataLoader


class Data(Rows):
    """Twenty short epochs, each with new workers."""


if __name__ == "__main__":
    loader = DataLoader(Data(64), batch_size=8, num_workers=4)
    for epoch in range(20):
        for batch in loader:
            time.sleep(0.002)
