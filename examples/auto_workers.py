"""num_workers="auto": the count is measured, and it cannot change a batch."""

import hashlib

import torch
from torch.utils.data import Dataset

import stoker


class Costly(Dataset):
    """Samples that cost about a millisecond of one core, as a small decode does, and a random crop."""

    def __len__(self):
        return 1200

    def __getitem__(self, index):
        x = torch.full((100, 100), index / len(self))
        for _ in range(10):
            x = (x @ x.T).sin()
        left = int(torch.randint(0, 36, ()))
        return x[:, left : left + 64].clone(), index


def main():
    torch.manual_seed(0)
    loader = stoker.DataLoader(Costly(), batch_size=50, shuffle=True, num_workers="auto")
    print(f"before it has measured: {loader.num_workers} workers, one a core granted")
    for epoch in (1, 2):
        digest = hashlib.sha256()
        for images, labels in loader:
            digest.update(images.numpy().tobytes() + labels.numpy().tobytes())
        print(f"epoch {epoch}: {loader.num_workers} workers, batches {digest.hexdigest()[:12]}")
    print("Had it measured another count, these batches would be the same.")


if __name__ == "__main__":
    main()
