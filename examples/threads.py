"""worker_method="thread": one dataset in memory, and random generators that belong to each worker."""

import torch
from torch.random import thread_safe_generator
from torch.utils.data import Dataset, get_worker_info

import stoker


class Blurred(Dataset):
    """Work that releases the GIL. The generator is the worker's in a thread, and torch's own anywhere else."""

    def __init__(self):
        self.photos = torch.rand(64, 3, 256, 256)  # not copied, not pickled: every thread sees this tensor

    def __len__(self):
        return len(self.photos)

    def __getitem__(self, index):
        x = self.photos[index] + 0.1 * torch.rand((), generator=thread_safe_generator())
        return torch.nn.functional.avg_pool2d(x, 9, stride=4), get_worker_info().id


def main():
    for method in ("thread", "process"):
        torch.manual_seed(0)
        loader = stoker.DataLoader(Blurred(), batch_size=8, num_workers=2, worker_method=method)
        total, ids = 0.0, set()
        for images, workers in loader:
            total += images.double().sum().item()
            ids |= set(workers.tolist())
        print(f"{method:8} workers {sorted(ids)}  sum {total:.6f}")


if __name__ == "__main__":
    main()
