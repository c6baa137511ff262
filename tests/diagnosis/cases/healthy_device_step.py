import time

from planted import Rows
from torch.utils.data import DataLoader


class Data(Rows):
    """A sample is next to nothing, and the step is a device's: the process waits for it."""


if __name__ == "__main__":
    loader = DataLoader(Data(1600), batch_size=8, num_workers=2)
    for batch in loader:
        time.sleep(0.02)
