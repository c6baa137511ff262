import time

import torch
from planted import Rows
from torch.utils.data import DataLoader


class Data(Rows):
    """The model is saved too often."""


if __name__ == "__main__":
    state = torch.ones(1000)
    for step, batch in enumerate(DataLoader(Data(1600), batch_size=8, num_workers=1)):
        time.sleep(0.01)
        if step % 25 == 24:
            time.sleep(0.25)  # as long as writing it takes
