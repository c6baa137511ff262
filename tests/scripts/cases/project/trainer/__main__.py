"""A package that is run with ``python -m trainer``, its options from the command line."""

import argparse

import torch
from seen import Seen, whose

from .datasets import build_dataset
from .transforms import build_transform


def parse_args():
    parser = argparse.ArgumentParser("trainer")
    parser.add_argument("--data-path", required=True)
    parser.add_argument("-b", "--batch-size", type=int, default=32)
    parser.add_argument("-j", "--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--crop", type=int, default=56)
    return parser.parse_args()


def main(args):
    torch.manual_seed(19)
    dataset = build_dataset(args.data_path, build_transform(args.crop))
    sampler = torch.utils.data.RandomSampler(dataset)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers, pin_memory=False
    )
    seen = Seen()
    for _ in range(args.epochs):
        for image, target in loader:
            seen.add(whose(image), target, drawn=image)
        seen.epoch()
    seen.end()


if __name__ == "__main__":
    main(parse_args())
