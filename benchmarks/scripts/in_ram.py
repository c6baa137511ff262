"""Everything is in memory: a TensorDataset, no workers. Nothing can be gained."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(100_000, 64), torch.randint(0, 10, (100_000,))
loader = DataLoader(TensorDataset(x, y), batch_size=256, shuffle=True)
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(net.parameters())
print("begin", flush=True)
for epoch in range(5):
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(net(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
