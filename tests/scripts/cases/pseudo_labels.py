"""Labels that the script writes anew after each epoch, as self-training does, and a caption that goes with them."""

import os

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset


class PseudoLabelled(Dataset):
    def __init__(self, root):
        self.paths = sorted(os.path.join(root, n) for n in os.listdir(root))
        self.labels = torch.zeros(len(self.paths), dtype=torch.long)
        self.history = [[] for _ in self.paths]

    def update(self, labels):
        self.labels = labels
        for past, y in zip(self.history, labels.tolist()):
            past.append(y)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        image = Image.open(self.paths[i]).resize((64, 48))
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        y = self.labels[i]
        past = len(self.history[i])
        if torch.rand(()) < 0.5:
            x = x.flip(2)
        return x, y, i, past


def main():
    torch.manual_seed(26)
    dataset = PseudoLabelled(os.path.join(os.environ["DATA"], "photos"))
    seen, flips = Seen(), Seen()
    for epoch in range(4):
        loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=2)
        for x, y, i, past in loader:
            seen.add(whose(x), i, y, past, x + x.flip(3))
            flips.add(i, drawn=x)
        seen.epoch()
        dataset.update((torch.arange(len(dataset)) * (epoch + 3)) % 7)
    flips.end()


if __name__ == "__main__":
    main()
