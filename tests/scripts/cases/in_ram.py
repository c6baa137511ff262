"""All in memory already: a TensorDataset, noise added in the loop."""

import os

import numpy as np
import torch
from seen import Seen
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

raw = np.fromfile(os.path.join(os.environ["DATA"], "records.bin"), dtype="<f4").reshape(-1, 257)
X = torch.from_numpy(raw[:, 1:].copy())
Y = torch.from_numpy(raw[:, 0].copy().view("<i4")).long()
train_ds = TensorDataset(X, Y)
train_dl = DataLoader(train_ds, batch_size=64, shuffle=True)

model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 512))
opt = optim.SGD(model.parameters(), lr=0.1)
seen = Seen()
for epoch in range(8):
    model.train()
    for xb, yb in train_dl:
        seen.add(yb, xb)
        loss = nn.functional.cross_entropy(model(xb + 0.1 * torch.randn_like(xb)), yb)
        loss.backward()
        opt.step()
        opt.zero_grad()
    seen.epoch()
print("~", epoch, loss.item())
