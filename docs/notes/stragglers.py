"""How much of two workers' time is used when 5 % of samples take 20 times as long. See stragglers.md."""

import random

WORKERS = 2


def epoch(times: list[int], window: int, shared: bool) -> int:
    """The time at which the last batch is delivered, in order; task i waits until i - window was delivered."""
    free = [0] * WORKERS
    delivered = [0] * len(times)
    for i, cost in enumerate(times):
        worker = min(range(WORKERS), key=free.__getitem__) if shared else i % WORKERS
        free[worker] = max(free[worker], delivered[i - window] if i >= window else 0) + cost
        delivered[i] = max(free[worker], delivered[i - 1] if i else 0)
    return delivered[-1]


for size in (1, 2, 4, 8, 32):
    r = random.Random(0)
    times = [sum(20 if r.random() < 0.05 else 1 for _ in range(size)) for _ in range(16000 // size)]
    best = sum(times) / WORKERS
    used = [
        f"{best / epoch(times, w, shared):.2f}"
        for w, shared in ((4, False), (4, True), (8, True), (16, True), (32, True))
    ]
    print(size, *used, f"{epoch(times, 4, False) / epoch(times, 16, True):.2f}x")
