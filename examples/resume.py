"""loader.state_dict(): a run that is killed resumes where it was, with other workers, to the same weights."""

import argparse
import os

import torch
from torch.utils.data import Dataset

import stoker


class Noisy(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        return torch.tensor([index / 120]) + 0.01 * torch.randn(1)  # random augmentation


def save(path, **state):
    torch.save(state, path + ".new")
    os.replace(path + ".new", path)  # the old file or the new one, never half of one


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", default="resume.pt")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--die-after", type=int, default=-1, metavar="BATCHES")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = stoker.DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=args.workers, task_seeds=True)
    epoch = 0
    if os.path.exists(args.checkpoint):
        found = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(found["model"])
        loader.load_state_dict(found["loader"])
        torch.set_rng_state(found["rng"])  # later epochs are drawn from it
        epoch = found["epoch"]
    seen = 0
    for e in range(epoch, 3):
        for x in loader:
            loss = (model(x) - 2 * x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rng = torch.get_rng_state()
            save(args.checkpoint, model=model.state_dict(), loader=loader.state_dict(), epoch=e, rng=rng)
            seen += 1
            if seen == args.die_after:
                os._exit(1)
    print(f"weight {model.weight.item():.9f}")


if __name__ == "__main__":
    main()
