"""stoker.DataLoader in the place of torch's: one import changed, the same batches to the bit."""

import time

import torch
from torch.utils.data import DataLoader, Dataset

import stoker


class Squares(Dataset):
    """Images that cost nothing to make, so that only the road to the training loop is left to see."""

    def __len__(self):
        return 1024

    def __getitem__(self, index):
        image = torch.full((3, 160, 160), float(index))
        return (image.flip(2) if torch.rand(()) < 0.5 else image) + torch.rand(()), index**2


def epoch(loader_class):
    torch.manual_seed(0)  # so that both shuffle, flip and shift alike
    loader = loader_class(Squares(), batch_size=64, shuffle=True, num_workers=2)
    began = time.perf_counter()
    sums = [(images.double().sum().item(), labels.sum().item()) for images, labels in loader]
    return sums, time.perf_counter() - began


def main():
    theirs, their_s = epoch(DataLoader)
    ours, our_s = epoch(stoker.DataLoader)
    print(f"torch  {their_s:.2f} s an epoch")
    print(f"stoker {our_s:.2f} s an epoch, the same batches: {ours == theirs}")


if __name__ == "__main__":
    main()
