"""torchdata's StatefulDataLoader: stopped in the middle of an epoch, and resumed from its state."""

import os

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader


class Photos(Dataset):
    def __init__(self, folder):
        self.paths = sorted(os.path.join(folder, n) for n in os.listdir(folder))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        x = torch.from_numpy(np.array(Image.open(self.paths[i]).resize((64, 48)))).permute(2, 0, 1)
        return (x.flip(2) if torch.rand(()) < 0.5 else x), i


def build():
    torch.manual_seed(14)
    return StatefulDataLoader(
        Photos(os.path.join(os.environ["DATA"], "photos")), batch_size=16, shuffle=True, num_workers=2
    )


def main():
    loader, seen = build(), Seen()
    for _ in range(2):
        for x, i in loader:
            seen.add(whose(x), i, drawn=x)
        seen.epoch()
    state, first = None, []
    for step, (_, i) in enumerate(loader):
        first += i.tolist()
        if step == 2:
            state = loader.state_dict()
            break
    torch.save(state, "loader.pt")
    resumed = build()
    resumed.load_state_dict(torch.load("loader.pt", weights_only=False))
    rest = []
    for x, i in resumed:
        seen.add(whose(x), i, drawn=x)
        rest += i.tolist()
    print("seen before and after the break:", len(first), len(rest), len(set(first) | set(rest)))
    seen.end()


if __name__ == "__main__":
    main()
