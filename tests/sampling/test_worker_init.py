"""Which functions for ``worker_init_fn`` only seed random generators."""

from __future__ import annotations

import argparse
import functools
import importlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

import stoker
from stoker.loader.auto import decide
from stoker.sampling.worker_init import KNOWN, only_seeds
from stoker.tuning.kept_epochs import why_not

args = argparse.Namespace(seed=3)
drawn: list[int] = []


def of_pytorchs_notes(worker_id: int) -> None:
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)


def of_numpys_state(worker_id: int) -> None:
    import numpy

    numpy.random.seed(numpy.random.get_state()[1][0] + worker_id)


def of_the_command_line(worker_id: int, rank: int = 0) -> None:
    np.random.seed(args.seed + worker_id + 100 * rank)


def set_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


def by_another(worker_id: int) -> None:
    info: Any = get_worker_info()
    if info.num_workers > 1:
        set_all(info.seed + info.id)


def closure(seed: int) -> Callable[[int], None]:
    return lambda worker_id: set_all(seed + worker_id)


def writes_into_the_dataset(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


def calls_the_dataset(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.open()


def sets_threads(worker_id: int) -> None:
    torch.set_num_threads(1)
    of_pytorchs_notes(worker_id)


def prints(worker_id: int) -> None:
    print(worker_id)


def notes(worker_id: int) -> None:
    drawn.append(worker_id)


def sets_a_global(worker_id: int) -> None:
    global args
    args = argparse.Namespace(seed=worker_id)


def calls_a_method_of_its_argument(worker_id: Any) -> None:
    random.seed(worker_id.close())


class Holder:
    """Has a method whose name says that it seeds."""

    def seed(self, seed: int) -> None:
        drawn.append(seed)


holder, config = Holder(), {"train": {"seed": 3, "sizes": [1, 2]}}


def of_a_config(worker_id: int) -> None:
    random.seed(config["train"]["seed"] + worker_id)  # type: ignore[operator]


def of_what_is_given(given: Any, worker_id: int) -> None:
    given.seed(worker_id)


def of_a_default(worker_id: int, given: Any = holder) -> None:
    given.seed(worker_id)


def of_a_global(worker_id: int) -> None:
    holder.seed(worker_id)


@pytest.mark.parametrize(
    "function",
    [
        of_a_config,
        of_pytorchs_notes,
        of_numpys_state,
        of_the_command_line,
        functools.partial(of_the_command_line, rank=2),
        by_another,
        closure(3),
        lambda worker_id: np.random.seed(worker_id),
    ],
)
def test_these_only_seed(function: Any) -> None:
    assert only_seeds(function)


@pytest.mark.parametrize(
    "function",
    [
        writes_into_the_dataset,
        calls_the_dataset,
        sets_threads,
        prints,
        notes,
        sets_a_global,
        calls_a_method_of_its_argument,
        functools.partial(print, 1),
        functools.partial(of_what_is_given, holder),
        functools.partial(of_what_is_given, given=holder),
        of_a_default,
        of_a_global,
        lambda worker_id: [random.seed(k) for k in range(worker_id)],
        argparse.ArgumentParser().parse_args,
        print,
        None,
    ],
)
def test_these_may_do_more(function: Any) -> None:
    assert not only_seeds(function)


def test_functions_of_libraries_are_where_they_are_said_to_be() -> None:
    found = 0
    for module, name in KNOWN:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            continue
        found += 1
        assert only_seeds(getattr(importlib.import_module(module), name))
    if not found:
        pytest.skip("none of them is installed")


def test_a_loader_whose_init_function_only_seeds_may_make_batches_here() -> None:
    data = list(range(10))
    for function, only_workers in ((of_pytorchs_notes, False), (sets_threads, True)):
        loader = stoker.DataLoader(data, num_workers="auto", worker_init_fn=function)  # type: ignore[arg-type]
        assert decide._only_workers(loader, "process") is only_workers
        plain = DataLoader(data, num_workers=2, worker_init_fn=function)  # type: ignore[arg-type]
        assert bool(why_not(plain)) is only_workers
