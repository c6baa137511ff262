"""The step takes far longer than the data; 1 worker. Nothing can be gained."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, i):
        t = torch.linspace(0, 1, 2048)
        return torch.sin(2 * torch.pi * (i % 64 + 1) * t + torch.rand(1)), i % 8


def main():
    torch.manual_seed(0)
    loader = DataLoader(Waves(), batch_size=32, shuffle=True, num_workers=1)
    body = [nn.Conv1d(1, 32, 15, padding=7), nn.GELU(), nn.Conv1d(32, 32, 15, padding=7), nn.GELU()]
    net = nn.Sequential(nn.Unflatten(1, (1, 2048)), *body, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    print("begin", flush=True)
    for epoch in range(5):
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
