"""stoker.DataLoader against torch's: 150 drawn configurations, most of them slow; two epochs, all a script can see.

``STOKER_SEED=n`` draws others. A failure prints the seed and the configuration, and is repeated by that seed alone.
"""

from __future__ import annotations

import inspect
import os
import random
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import stoker

from . import datasets as d
from . import trace

SEED = int(os.environ.get("STOKER_SEED", "0"))
TORCH_HAS_IN_ORDER = "in_order" in inspect.signature(torch.utils.data.DataLoader.__init__).parameters  # since 2.6
CONFIGS, PER_TEST = 150, 5


def draw(rng: random.Random) -> tuple[Any, dict[str, Any], str]:
    """A builder of (args, kwargs), a plan, and a description."""
    n = rng.choice([0, 1, 5, 17, 30])
    style = rng.choice(
        ["map"] * 6 + ["batched", "counting", "tensors", "subset", "concat", "stream", "stream", "sized", "uneven"]
    )
    kind = rng.choice(d.MAP_KINDS)
    error = rng.choice(d.ERRORS)
    bad = tuple(rng.sample(range(n), min(n, rng.choice([1, 2])))) if error and n else ()
    workers = rng.choice([0, 1, 1, 2, 2, 3])
    kw: dict[str, Any] = {"num_workers": workers}
    iterable = style in ("stream", "sized", "uneven")
    said = rng.choice([n, max(1, n // 2), n + 4])
    sampling = (
        "none"
        if iterable
        else rng.choice(
            ["none", "shuffle", "shuffle", "list", "weighted", "lazy", "eager", "random", "batches", "lists"]
        )
    )
    batch = rng.choice([None, 1, 2, 3, 7, 40]) if sampling not in ("batches", "lists") else 1
    if sampling not in ("batches", "lists"):
        kw["batch_size"] = batch
        if batch is not None:
            kw["drop_last"] = rng.random() < 0.3
    if sampling == "shuffle":
        kw["shuffle"] = True
    collate = rng.choice(d.COLLATES)
    if collate is not None:
        kw["collate_fn"] = collate
    if rng.random() < 0.4:
        kw["worker_init_fn"] = rng.choice(d.INITS)
    with_generator = rng.random() < 0.3
    if workers:
        kw["prefetch_factor"] = rng.choice([None, 1, 2, 3, 5])
        kw["persistent_workers"] = rng.random() < 0.4
        kw["timeout"] = rng.choice([0, 0, 60])
        # With one worker the order of completion is the order of asking.
        in_order = workers > 1 or rng.random() < 0.7
        if TORCH_HAS_IN_ORDER:
            kw["in_order"] = in_order
    kw["pin_memory"] = rng.random() < 0.1

    def build() -> tuple[tuple[Any, ...], dict[str, Any]]:
        made = dict(kw)
        if with_generator:
            made["generator"] = torch.Generator().manual_seed(11)
        match style:
            case "map":
                ds: Any = d.Map(n, kind, error, bad)
            case "batched":
                ds = d.Batched(n, kind)
            case "counting":
                ds = d.Counting(n, kind)
            case "tensors":
                ds = TensorDataset(torch.arange(n * 4.0).reshape(n, 4), torch.arange(n))
            case "subset":
                ds = Subset(d.Map(n + 3, kind), list(range(n)))
            case "concat":
                ds = ConcatDataset([d.Map(n, kind), d.Map(3, kind)])
            case "stream":
                ds = d.Stream(n, kind, error, bad, shard=n % 2 == 1)
            case "sized":
                ds = d.SizedStream(said, n=n, kind=kind)
            case "uneven":
                ds = d.Uneven(n, kind)
        total = 0 if iterable else len(ds)
        match sampling:
            case "list":
                made["sampler"] = list(range(total))[::-1]
            case "weighted" if total:
                made["sampler"] = WeightedRandomSampler([1.0] * total, 9)
            case "lazy" if total:
                made["sampler"] = d.LazySampler(total, 13)
            case "eager" if total:
                made["sampler"] = d.EagerSampler(total, 13)
            case "random":
                made["sampler"] = SubsetRandomSampler(range(total))
            case "batches" if total:
                made["batch_sampler"] = d.LazyBatches(total, 6)
            case "lists":
                made["batch_sampler"] = [[i] * 2 for i in range(min(total, 5))]
        return (ds,), made

    left = rng.choice([None, None, 0, 1, 3])
    plan = {
        "seed": rng.randrange(1 << 30),
        "epochs": 2,
        "leave_after": left,
        "ask_len": rng.random() < 0.5,
        "limit": 60,
    }
    return (
        build,
        plan,
        f"style={style} n={n} kind={kind} error={error} bad={bad} sampling={sampling} said={said} {kw} {plan}",
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(CONFIGS // PER_TEST))
def test_the_same_as_torch(part: int) -> None:
    for i in range(part * PER_TEST, (part + 1) * PER_TEST):
        compare(f"{SEED}/{i}")


def compare(seed: str) -> None:
    build, plan, words = draw(random.Random(seed))
    theirs = trace.run(torch.utils.data.DataLoader, build, plan)
    ours = trace.run(stoker.DataLoader, build, plan)
    for t, o in zip(theirs, ours, strict=False):
        assert o == t, f"seed {seed}: {words}\ntorch:  {str(t)[:1500]}\nstoker: {str(o)[:1500]}"
    assert len(ours) == len(theirs), f"seed {seed}: {words}\n{ours[len(theirs) :]}\n{theirs[len(ours) :]}"
