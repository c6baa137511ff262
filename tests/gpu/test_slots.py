"""Page-locked slots with a real device: nothing corrupted, nothing copied twice, nothing left locked."""

from __future__ import annotations

import gc
import os
import random
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import stoker
from stoker.loader.device_iterator import ResidentIter
from stoker.loader.loader_state import state_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
WIDE = 1 << 14


class Marked(Dataset[Any]):
    """Row i is i, i + 1, ...: a sum tells whether any of it is another batch's."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return torch.arange(i, i + WIDE, dtype=torch.int64), i


@pytest.mark.parametrize("workers", [2, 8])
def test_no_batch_is_corrupted_on_whatever_stream(workers: int) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    rng = random.Random(seed)
    batches = 10_000  # twice: 20,000
    loader = stoker.DataLoader(Marked(batches * 4), batch_size=4, num_workers=workers, pin_memory=True)
    streams = [torch.cuda.Stream() for _ in range(6)] + [torch.cuda.default_stream()]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    steps = torch.arange(WIDE, device="cuda")
    pinned = 0
    held: list[Any] = []
    for x, i in loader:
        pinned += x.is_pinned()
        stream = rng.choice(streams)
        with torch.cuda.stream(stream):
            if rng.random() < 0.2:
                torch.cuda._sleep(200_000)  # the copy is late
            there = x.to("cuda", non_blocking=True)
            first = i.to("cuda", non_blocking=True)
            bad = (there != first[:, None] + steps).sum()
        torch.cuda.default_stream().wait_stream(stream)
        wrong += bad
        there.record_stream(torch.cuda.default_stream())
        if rng.random() < 0.1:
            held.append((x, i.clone()))
        if len(held) > 8:
            y, j = held.pop(rng.randrange(len(held)))
            assert torch.equal(y[:, 0], j)
        del x, i
    assert int(wrong) == 0
    assert pinned == batches
    locker = state_of(loader).pinning.locker
    assert locker is not None
    assert not locker.over


def test_a_batch_is_copied_once() -> None:
    """The worker's collate writes to the slot; what the copy engine reads is that very slot."""
    loader = stoker.DataLoader(Marked(400), batch_size=4, num_workers=2, pin_memory=True)
    for x, _ in loader:
        assert x.is_pinned()
    state = state_of(loader)
    assert state.pinning.locker is not None
    assert 0 < state.pinning.locker.locked <= 1 << 30
    locker = state.pinning.locker
    del loader, x, _, state  # both tensors lie in the last slot
    gc.collect()
    assert locker.locked == 0


def test_batches_ahead_on_the_device() -> None:
    loader = stoker.DataLoader(
        Marked(4000), batch_size=4, num_workers=2, pin_memory="auto", device="cuda", transform_on_device=lambda b: b
    )
    seen = 0
    for x, i in loader:
        assert x.is_cuda
        assert bool((x[:, 0] == i).all())
        seen += len(i)
    assert seen == 4000


def test_tensors_on_the_device_are_gathered_there() -> None:
    data = TensorDataset(torch.arange(100, device="cuda"), torch.arange(100, device="cuda") * 2)
    it = iter(stoker.DataLoader(data, batch_size=7, shuffle=True, num_workers=3, pin_memory=True))
    assert isinstance(it, ResidentIter)
    assert sorted(int(v) for x, _ in it for v in x) == list(range(100))


def test_a_failed_call_leaves_no_error_behind() -> None:
    from stoker.device.cuda import Cuda

    cuda = Cuda()
    assert cuda.register(0x10, 4096)  # nobody's memory
    torch.ones(4, device="cuda").sum().item()  # would raise what was left behind
    fence = cuda.fence()
    assert fence is not None
    fence.wait()
