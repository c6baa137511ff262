"""Trains a small net on photographs that are decoded anew every epoch: the script people really write, torch only."""

import argparse
import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

DATA = Path(__file__).parent / "data"


class Photos(Dataset):
    def __init__(self, folder=DATA):
        with open(folder / "labels.csv", newline="") as file:
            self.rows = [(folder / row["path"], int(row["label"])) for row in csv.DictReader(file)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        path, label = self.rows[index]
        image = Image.open(path).convert("RGB").resize((128, 96)).crop((32, 16, 96, 80))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return pixels.flip(2) if torch.rand(()) < 0.5 else pixels, label


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    if not (args.data / "labels.csv").is_file():
        parser.exit(2, f"No photographs in {args.data}; make them first: python examples/make_photos.py\n")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(Photos(args.data), batch_size=100, shuffle=True, num_workers=1)
    body = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU()]
    net = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 17)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        loss_sum, right = torch.zeros(2, device=device)
        for images, labels in loader:
            scores, labels = net(images.to(device)), labels.to(device)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(labels)
            right += (scores.argmax(1) == labels).sum()
        loss, right = (loss_sum / len(loader.dataset)).item(), (right / len(loader.dataset)).item()
        print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {right:.1%}", flush=True)


if __name__ == "__main__":
    main()
