from planted import Rows, burn
from torch.utils.data import DataLoader


class Data(Rows):
    """The step computes on the same cores."""


if __name__ == "__main__":
    loader = DataLoader(Data(1200), batch_size=8, num_workers=1)
    for batch in loader:
        burn(25)
