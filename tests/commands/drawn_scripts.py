"""Twenty scripts of different kinds, each of which prints what it trained on, for test_drawn_faults.py."""

from __future__ import annotations

PRELUDE = """
import functools, multiprocessing as mp, os, random, sys, threading, time
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info
torch.set_num_threads(1)

class Data(Dataset):
    def __init__(self, n=64, draws=False, bad=None, path=None):
        self.n, self.draws, self.bad = n, draws, bad
        self.file = path and open(path, "rb")
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        x = self.load(i)
        if i == self.bad:
            raise ValueError(f"sample {i} is bad")
        return (x + torch.rand(16) if self.draws else x), i
    def load(self, i):
        time.sleep(0.003)  # stands for a decoder
        if self.file:
            return torch.tensor(list(os.pread(self.file.fileno(), 16, i * 16)), dtype=torch.float)
        return torch.sin(torch.arange(16.0) * i)

def show(name, batches):
    total, seen = 0.0, []
    for x, i in batches:
        total += float(x.double().sum())
        seen += i.reshape(-1).tolist()
    print(name, f"{total:.6f}", hash(tuple(seen)), len(seen), flush=True)

def train(loader, epochs=5, name="epoch"):
    for epoch in range(epochs):
        show(f"{name} {epoch}", loader)

def own():
    # The script's own process, which nobody is to end.
    open(f"own-{os.getpid()}", "w").close()

def main():
    torch.manual_seed(0)
"""
END = """
if __name__ == "__main__":
    print("begins", flush=True)
    main()
"""
SCRIPTS = {
    "inline": "    train(DataLoader(Data(), 8, shuffle=True))",
    "inline_draws": "    train(DataLoader(Data(draws=True), 8, shuffle=True))",
    "workers": "    train(DataLoader(Data(), 8, shuffle=True, num_workers=2))",
    "workers_draw": "    train(DataLoader(Data(draws=True), 8, shuffle=True, num_workers=2))",
    "persistent": "    train(DataLoader(Data(draws=True), 8, shuffle=True, num_workers=2, persistent_workers=True))",
    "spawn": "    train(DataLoader(Data(), 8, num_workers=1, multiprocessing_context='spawn', persistent_workers=True))",
    "forkserver": "    train(DataLoader(Data(draws=True), 8, num_workers=2, multiprocessing_context='forkserver'), 3)",
    "staged": """
    import stoker
    train(stoker.DataLoader(stoker.Staged(Data(draws=True)), 8, shuffle=True, num_workers=2))
""",
    "staged_disk": """
    import stoker
    data = stoker.Staged(Data(), cache="disk", cache_dir="cache")
    train(stoker.DataLoader(data, 8, shuffle=True, num_workers=2))
""",
    "stream": """
    class Stream(IterableDataset):
        def __iter__(self):
            for i in range(96):
                time.sleep(0.003)
                yield torch.full((4,), float(i)), i
    train(DataLoader(Stream(), 8), 4)
""",
    "collate": """
    def collate(rows):
        time.sleep(0.01)
        return torch.stack([x for x, _ in rows]) * torch.rand(()), torch.tensor([i for _, i in rows])
    train(DataLoader(Data(), 8, shuffle=True, num_workers=2, collate_fn=collate))
""",
    "bad_sample": """
    for epoch in range(4):
        batches = iter(DataLoader(Data(bad=20), 8, num_workers=2))
        while True:
            try:
                show("batch", [next(batches)])
            except ValueError as e:
                print(type(e).__name__, flush=True)
            except StopIteration:
                break
""",
    "fails": """
    train(DataLoader(Data(), 8, num_workers=2), 3)
    train(DataLoader(Data(bad=50), 8, num_workers=2))
""",
    "folds": """
    data = Data(draws=True)
    for fold in range(3):
        held = set(range(fold, 64, 3))
        train(DataLoader(Subset(data, sorted(set(range(64)) - held)), 8, shuffle=True, num_workers=2), 2, f"fold {fold}")
        train(DataLoader(Subset(data, sorted(held)), 8), 1, "validation")
""",
    "threads": """
    # Nothing draws: threads take turns with the generator as it comes. An error in one of them ends the script.
    threading.excepthook = lambda args: (sys.__excepthook__(*args[:3]), os._exit(1))
    lines, lock = {}, threading.Lock()
    def run(k):
        lines[k] = sum(float(x.sum()) for _ in range(4) for x, _ in DataLoader(Data(48), 8, num_workers=k))
        with lock:
            print("one has ended", flush=True)
    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    print(sorted(lines.items()))
""",
    "left_early": """
    loader = DataLoader(Data(draws=True), 4, shuffle=True, num_workers=2)
    for epoch in range(8):
        show("part", (b for b, _ in zip(loader, range(5 + epoch % 2))))
""",
    "exits": """
    for epoch in range(3):
        for k, (x, i) in enumerate(DataLoader(Data(), 8, shuffle=True, num_workers=2)):
            print(epoch, k, i.tolist(), flush=True)
            if epoch == 2 and k == 4:
                sys.exit(7)
""",
    "file": """
    with open("rows.bin", "wb") as f:
        f.write(random.Random(0).randbytes(64 * 16))
    train(DataLoader(Data(path="rows.bin", draws=True), 8, shuffle=True, num_workers=2))
""",
    "pool": """
    with mp.get_context("fork").Pool(2, own) as pool:
        for k, lines in enumerate(pool.imap(fold, range(4))):
            print(k, lines, flush=True)
def fold(k):
    torch.manual_seed(k)
    return [float(x.sum()) for _ in range(2) for x, _ in DataLoader(Data(32, draws=True), 8, shuffle=True)]
""",
    "ranks": """
    import torch.multiprocessing as tmp
    tmp.start_processes(rank, (f"file://{os.getcwd()}/meet-{os.getpid()}",), nprocs=2, start_method="fork")
def rank(k, meet):
    import torch.distributed as dist
    from torch.utils.data import DistributedSampler
    own()
    dist.init_process_group("gloo", init_method=meet, rank=k, world_size=2)
    sampler = DistributedSampler(Data(64))
    loader = DataLoader(Data(64), 8, sampler=sampler, num_workers=1)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = sum(x.double().sum() for x, _ in loader).reshape(1)
        dist.all_reduce(total)
        if k == 0:
            print(epoch, f"{float(total):.6f}", flush=True)
    dist.destroy_process_group()
""",
}

# Their loaders have no workers of torch's, whose death is an error in torch, too.
HEALED = {"inline", "inline_draws", "staged", "staged_disk", "stream", "pool"}


def source(name: str) -> str:
    return PRELUDE + SCRIPTS[name] + END
