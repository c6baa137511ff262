"""A run under torchrun that can be resumed with any number of ranks; ``test_torchrun.py`` starts it.

    torchrun --nproc-per-node 2 elastic.py FOLDER map|iterable file|dcp [--stop AFTER] [--die AFTER] [--hold]

After each step it saves the loader's place, and what all ranks have seen of the epoch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import DistributedSampler, IterableDataset

import stoker

N = 61


class Lines(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        part = stoker.shard()
        return iter(range(part.id, N, part.num_shards))


class Seen:
    """What all ranks have seen, as a checkpoint has it."""

    def __init__(self) -> None:
        self.all: list[int] = []
        self.worlds: list[int] = []  # numbers of ranks, so far

    def state_dict(self) -> dict[str, Any]:
        return {"all": ",".join(map(str, self.all)), "worlds": ",".join(map(str, self.worlds))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.all, self.worlds = ([int(i) for i in state[name].split(",") if i] for name in ("all", "worlds"))


def loader_of(kind: str) -> Any:
    if kind == "iterable":
        return stoker.DataLoader(Lines(), batch_size=3, num_workers=2)
    sampler = DistributedSampler(range(N), seed=7)  # type: ignore[arg-type]
    return stoker.DataLoader(range(N), batch_size=3, sampler=sampler, num_workers=1)


def save(folder: Path, how: str, state: dict[str, Any]) -> None:
    if how == "dcp":
        dcp.save(state, checkpoint_id=folder / "new")
    else:
        values = {name: one.state_dict() for name, one in state.items()}
        if dist.get_rank() == 0:
            (folder / "new").mkdir(exist_ok=True)
            torch.save(values, folder / "new" / "checkpoint.pt")
    dist.barrier()
    if dist.get_rank() == 0:  # a rank may die while it writes
        shutil.rmtree(folder / "old", ignore_errors=True)
        if (folder / "last").exists():
            os.rename(folder / "last", folder / "old")
        os.rename(folder / "new", folder / "last")
    dist.barrier()


def load(folder: Path, how: str, state: dict[str, Any]) -> None:
    if how == "dcp":
        dcp.load(state, checkpoint_id=folder / "last")
        return
    for name, values in torch.load(folder / "last" / "checkpoint.pt", weights_only=True).items():
        state[name].load_state_dict(values)


def hold(folder: Path) -> None:
    """Waits until torchrun ends this process: a node came, or the one with rank 1 was killed."""
    (folder / f"held-{dist.get_world_size()}").touch()
    if dist.get_rank() == 0 and dist.get_world_size() > 1:
        dist.barrier()
    while True:
        signal.pause()


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("folder", type=Path)
    p.add_argument("kind")
    p.add_argument("how")
    p.add_argument("--stop", type=int, default=-1)
    p.add_argument("--die", type=int, default=-1)
    p.add_argument("--hold", action="store_true", help="one rank waits for a second; two wait until one is killed")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    loader, seen = loader_of(args.kind), Seen()
    state = {"loader": stoker.AllRanks(loader), "seen": seen}
    if (args.folder / "last").exists():
        load(args.folder, args.how, state)
    world = dist.get_world_size()
    holds = args.hold and (world == 2 or 2 not in seen.worlds)
    seen.worlds.append(world)
    batches, step, over = iter(loader), 0, False
    while step != args.stop and not over:
        mine = next(batches, torch.tensor([], dtype=torch.int64)).tolist()
        shares: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(shares, mine)
        seen.all += itertools.chain.from_iterable(shares)
        over = not any(shares)
        step += 1
        if step == args.die and first and rank == 1:
            os._exit(1)  # between a step and its checkpoint
        if not over:
            save(args.folder, args.how, state)
        if holds and step == 2:
            hold(args.folder)
    if rank == 0:
        (args.folder / ("over" if over else "stopped")).write_text(" ".join(seen.state_dict().values()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
