import time

from planted import Rows
from torch.utils.data import DataLoader


def epoch():
    """Makes its loader anew each time, so that the workers it asks to stay cannot."""
    for batch in DataLoader(Rows(64), batch_size=8, num_workers=4, persistent_workers=True):
        time.sleep(0.002)


if __name__ == "__main__":
    for _ in range(20):
        epoch()
