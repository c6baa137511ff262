import time

from planted import Rows
from torch.utils.data import DataLoader


class Data(Rows):
    """So little a sample that no worker is needed."""


if __name__ == "__main__":
    loader = DataLoader(Data(4000), batch_size=16)
    for batch in loader:
        time.sleep(0.01)
