from planted import Rows, burn, compute, device
from torch.utils.data import DataLoader

if __name__ == "__main__":
    cuda = device()
    step = compute(cuda, 10)
    for i, batch in enumerate(DataLoader(Rows(4800), batch_size=8, num_workers=2, pin_memory=True)):
        loss = step() + batch.to(cuda, non_blocking=True)[0, 0]
        burn(1)
        if i % 100 == 99:
            print(loss.item())
