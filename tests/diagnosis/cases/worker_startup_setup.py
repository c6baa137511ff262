import time

from planted import Rows
from torch.utils.data import DataLoader


def connect(worker):
    """What a worker needs before it can begin."""
    time.sleep(0.2)


if __name__ == "__main__":
    loader = DataLoader(Rows(160), batch_size=8, num_workers=2, worker_init_fn=connect)
    for epoch in range(8):
        for batch in loader:
            time.sleep(0.01)
