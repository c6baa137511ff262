import time

from planted import Rows, burn
from torch.utils.data import DataLoader


class Data(Rows):
    """Every tenth step draws a picture of the weights."""


if __name__ == "__main__":
    for step, batch in enumerate(DataLoader(Data(1600), batch_size=8, num_workers=1)):
        time.sleep(0.01)
        if step % 10 == 9:
            burn(80)
