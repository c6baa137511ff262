"""Checks whether a ``worker_init_fn`` does nothing but seed random generators.

Most only seed: PyTorch's notes on reproducibility show such a function, and MONAI, transformers and Lightning pass one
automatically. It can be called again in a worker that stays for another epoch. One that does more (opens a file, sets
the number of threads, modifies the dataset) needs a new process. The check reads the function's code and calls nothing.
"""

from __future__ import annotations

import argparse
import dis
import functools
import inspect
import random
import types
from collections.abc import Iterable
from typing import cast

import numpy as np
import torch

# libraries' functions, which seed through their own helpers
KNOWN = {
    ("monai.data.utils", "worker_init_fn"),
    ("transformers.trainer_utils", "seed_worker"),
    ("lightning.fabric.utilities.seed", "pl_worker_init_function"),
    ("lightning_fabric.utilities.seed", "pl_worker_init_function"),
    ("mmengine.dataset.utils", "worker_init_fn"),
    ("detectron2.data.build", "worker_init_reset_seed"),
}
MODULES = (random, np, np.random, torch, torch.cuda, torch.random, torch.utils, torch.utils.data)
BUILTINS = {abs, hash, id, int, isinstance, len, max, min, pow, range, round, sum, AssertionError}
ATTRIBUTES = {
    "cuda",
    "data",
    "generate_state",
    "get_state",
    "get_worker_info",
    "is_available",
    "item",
    "num_workers",
    "numpy",
    "randint",
    "random",
    "torch",
    "utils",
}  # and any attribute with "seed" in its name
PLAIN = (int, float, bool, str, type(None), np.integer)
NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_", "YIELD_", "SETUP_WITH", "BEFORE_WITH")
MOST_FUNCTIONS = 4  # depth of calls that is followed


def only_seeds(function: object, depth: int = MOST_FUNCTIONS) -> bool:
    """Whether calling ``function`` only seeds random generators. False if this cannot be determined."""
    if isinstance(function, functools.partial):
        return _is_setting((*function.args, function.keywords)) and only_seeds(function.func, depth)
    if (getattr(function, "__module__", ""), getattr(function, "__qualname__", "")) in KNOWN:
        return True
    if not isinstance(function, types.FunctionType) or not depth:
        return False
    if not _is_setting((function.__defaults__, function.__kwdefaults__)):
        return False
    code = function.__code__
    if any(isinstance(constant, types.CodeType) for constant in code.co_consts):
        return False
    if any(i.opname.startswith(STORES) for i in dis.get_instructions(code)):
        return False
    used = inspect.getclosurevars(function)
    values = {**used.globals, **used.nonlocals}
    return (
        all(_is_harmless(name) for name in used.unbound)
        and BUILTINS.issuperset(used.builtins.values())
        and all(_may_use(name, value, depth) for name, value in values.items())
    )


def _is_harmless(attribute: str) -> bool:
    return attribute in ATTRIBUTES or "seed" in attribute.lower()


def _is_setting(value: object, depth: int = 4) -> bool:
    """Whether a value is plain, or holds only plain values, so it has no ``seed`` method that does something else."""
    if isinstance(value, NAMESPACES):
        value = vars(value)
    if type(value) is dict:
        value = tuple(value.values())
    if type(value) in (tuple, list):
        return depth > 0 and all(_is_setting(item, depth - 1) for item in cast("Iterable[object]", value))
    return isinstance(value, PLAIN)


def _may_use(name: str, value: object, depth: int) -> bool:
    """Whether a function that uses this outer variable may still only seed."""
    if any(value is module for module in MODULES) or _is_setting(value):
        return True
    if only_seeds(value, depth - 1):
        return True
    home = getattr(value, "__module__", None) or type(getattr(value, "__self__", None)).__module__
    return callable(value) and str(home).partition(".")[0] in ("random", "numpy", "torch") and _is_harmless(name)
