"""Predicts a price from rows of a table: dates, categories and numbers are parsed each time a row is asked for."""

import argparse
import csv
import math
import random
from datetime import datetime
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CITIES = ("Athens", "Bergen", "Cork", "Dresden", "Evora")


class Sales(Dataset):
    """Features as people write them for one row; a cell in twenty is hidden in training."""

    def __init__(self, path, hide=0.05):
        with open(path, newline="") as file:
            self.rows = list(csv.DictReader(file))
        self.hide = hide

    def __len__(self):
        return len(self.rows)

    def features(self, row):
        sold = datetime.strptime(row["sold"], "%Y-%m-%d %H:%M")
        day, hour = sold.timetuple().tm_yday, sold.hour + sold.minute / 60
        out = [math.sin(2 * math.pi * day / 365), math.cos(2 * math.pi * day / 365), sold.weekday() / 6, hour / 24]
        out += [float(row["city"].strip().title() == city) for city in CITIES]
        for name in ("area", "rooms", "age"):
            value = float(row[name].replace(",", "") or "nan")
            out += [0.0, 1.0] if math.isnan(value) else [math.log1p(value), 0.0]
        words = row["text"].lower().split()
        out += [sum(len(word) % 16 == k for word in words) / len(words) for k in range(16)]
        return torch.tensor(out), torch.tensor(float(row["price"]))

    def __getitem__(self, index):
        x, y = self.features(self.rows[index])
        return x * (torch.rand(len(x)) >= self.hide), y


def make_table(path, count):
    rng = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sold", "city", "area", "rooms", "age", "text", "price"])
        for _ in range(count):
            sold = (
                f"20{rng.randint(10, 24)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d} {rng.randint(8, 19):02d}:30"
            )
            city, area, rooms = rng.choice(CITIES), rng.randint(20, 4000), rng.randint(1, 9)
            text = " ".join("x" * rng.randint(1, 20) for _ in range(rng.randint(20, 80)))
            price = math.log1p(area) + 0.2 * rooms + CITIES.index(city) / 5
            rows.writerow([sold, f" {city.upper()}", f"{area:,}", rooms, rng.choice(["", 5, 40]), text, f"{price:.4f}"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--count", type=int, default=20_000, help="rows")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    path = args.data / "sales.csv"
    if not path.exists():
        make_table(path, args.count)
    torch.manual_seed(0)
    data = Sales(path)
    loader = DataLoader(data, batch_size=100, shuffle=True, num_workers=2)
    net = nn.Sequential(nn.Linear(len(data[0][0]), 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for epoch in range(args.epochs):
        total = 0.0
        for x, y in loader:
            loss = nn.functional.mse_loss(net(x)[:, 0], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: error {total / len(loader):.4f}", flush=True)


if __name__ == "__main__":
    main()
