import torch
from planted import Rows, device
from torch.utils.data import DataLoader

if __name__ == "__main__":
    cuda = device()
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(60))).to(cuda)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, foreach=False)  # a launch a parameter
    for batch in DataLoader(Rows(6400), batch_size=8, num_workers=2, pin_memory=True):
        optimizer.zero_grad()
        net(batch.to(cuda, non_blocking=True)).square().mean().backward()
        optimizer.step()
