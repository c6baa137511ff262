"""Two ranks under torchrun with a DistributedSampler that shuffles anew; 1 worker each, 5 epochs."""

import torch
import torch.distributed as dist
from pil_compose import Compose, Photos, RandomCrop, RandomHorizontalFlip, Resize, ToTensor, small_net
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


def train(dataset, workers=1, epochs=5):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=workers)
    net = nn.parallel.DistributedDataParallel(small_net())
    opt = torch.optim.SGD(net.parameters(), 1e-2)
    first = dist.get_rank() == 0
    if first:
        print("begin", flush=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
        if first:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Photos(Compose([Resize(160), RandomCrop(128), RandomHorizontalFlip(), ToTensor()]), 3000))
