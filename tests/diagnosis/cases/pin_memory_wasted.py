import time

from planted import Rows
from torch.utils.data import DataLoader


class Data(Rows):
    """Pinned for an accelerator that is not there."""


if __name__ == "__main__":
    loader = DataLoader(Data(800), batch_size=8, num_workers=2, pin_memory=True)
    for batch in loader:
        time.sleep(0.02)
