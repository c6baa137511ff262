from planted import Rows, burn, compute, device
from torch.utils.data import DataLoader

if __name__ == "__main__":
    cuda = device()
    step = compute(cuda, 5)
    for batch in DataLoader(Rows(6400), batch_size=8, num_workers=2, pin_memory=True):
        x = batch.to(cuda)  # page-locked, and waits for all the device was asked for
        loss = step() + x[0, 0]
        burn(3)
    print(loss.item())
