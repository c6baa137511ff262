import time

from planted import Rows
from torch.utils.data import DataLoader

if __name__ == "__main__":
    loader = DataLoader(Rows(4000), batch_size=8, shuffle=True, num_workers=2, persistent_workers=False)
    for step in range(60):
        batch = next(iter(loader))
        time.sleep(0.005)
