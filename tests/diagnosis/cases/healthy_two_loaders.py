import time

from planted import Rows
from torch.utils.data import DataLoader


class Data(Rows):
    """Training, and a look at a second set after each epoch."""


if __name__ == "__main__":
    train = DataLoader(Data(800), batch_size=8, num_workers=1, persistent_workers=True)
    held_out = DataLoader(Data(160), batch_size=8)
    for epoch in range(2):
        for batch in train:
            time.sleep(0.02)
        for batch in held_out:
            time.sleep(0.01)
