"""Turns what a user names into loaders: TARGET on the command line, and copies with other settings."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import sys
from types import MethodType, ModuleType
from typing import TypeGuard, TypeVar

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from ..core.errors import UsageError, one_line
from ..core.options import BATCH_SIZE, AutoWorkers
from ..core.types import LoaderLike, Sample
from .engine import get_iterator, torch_get_iterator
from .loader_state import state_of

Loader = TypeVar("Loader", bound=LoaderLike)
ENGINES = ("torch", "stoker")
FORM = "TARGET is path.py:name or package.module:name, as in train.py:make_loader"


def find(text: str) -> object:
    """The object that TARGET names: ``path.py:name`` or ``package.module:name``. Its module is imported under its own
    name, so code behind ``if __name__ == "__main__"`` does not run. Raises UsageError if there is no such file, module
    or name, or importing it failed."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f"{text!r} has no name after the colon: {FORM}")
    try:
        module = _by_path(where) if where.endswith(".py") or os.sep in where else _by_name(where)
    except UsageError:
        raise
    except (Exception, SystemExit) as e:
        raise UsageError(f"importing {where} failed: {one_line(e)}") from e
    found: object = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = [n for n in vars(module) if not n.startswith("_")]
            raise UsageError(f"{where} has no {name!r}; it has {', '.join(public) or 'nothing'}") from None
    return found


def _by_path(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise UsageError(f"file {path} does not exist")
    folder, file = os.path.split(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for a script; spawned workers import it by name as well
    name = file.removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _by_name(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and (name == e.name or name.startswith(e.name + ".")):
            raise UsageError(f"no module named {e.name!r}") from None
        raise


def as_loader(thing: object, batch_size: int | None = None, name: str = "TARGET") -> DataLoader[Sample]:
    """Returns a loader over ``thing``, which errors call ``name``. A DataLoader (torch's or stoker's) is returned as it
    is; a dataset gets a new one, with 32 samples per batch if no size is given. A callable is called first, without
    arguments. Raises UsageError if ``thing`` is anything else, or empty."""
    if not isinstance(thing, (DataLoader, Dataset)) and (isinstance(thing, type) or callable(thing)):
        try:
            thing = thing()
        except Exception as e:
            raise UsageError(f"calling {name}() failed: {one_line(e)}") from e
    if isinstance(thing, DataLoader):
        _check(thing.dataset, name)
        return thing if batch_size in (None, thing.batch_size) else variant(thing, batch_size=batch_size)
    if not _is_dataset(thing):
        raise UsageError(f"{name} is of type {type(thing).__name__}, not a Dataset or a DataLoader")
    _check(thing, name)
    from .dataloader import DataLoader as Own

    streams = isinstance(thing, IterableDataset)
    return Own(thing, batch_size=batch_size or BATCH_SIZE, shuffle=None if streams else True)


def variant(
    loader: Loader, num_workers: int | None = None, batch_size: int | None = None, engine: str | None = None
) -> Loader:
    """A copy of a loader (torch's, stoker's, or of a derived class), of the same class, with its settings except those
    given here. ``engine``: "torch" or "stoker". Raises UsageError if the loader makes its own batches, or torch's
    engine is asked for ``num_workers="auto"``."""
    twin = copy.copy(loader)
    fields = vars(twin)  # via __dict__, because torch refuses to set these attributes after construction
    fields["_iterator"] = None
    state_of(twin).adopted = state_of(loader).adopted  # the copy has these settings already
    if num_workers is not None:
        fields["num_workers"] = num_workers
        if num_workers:
            fields["prefetch_factor"] = loader.prefetch_factor or 2
        else:
            fields.update(prefetch_factor=None, persistent_workers=False, timeout=0)
    if batch_size is not None and batch_size != loader.batch_size:
        if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
            raise UsageError(
                "the loader makes its own batches (batch_size=None or a batch_sampler), so their size cannot be changed"
            )
        fields["batch_size"] = batch_size
        fields["batch_sampler"] = BatchSampler(loader.sampler, batch_size, loader.drop_last)
    if engine is not None:
        if engine not in ENGINES:
            raise UsageError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
        if engine == "torch" and isinstance(twin.num_workers, AutoWorkers):
            raise UsageError('torch\'s engine does not support num_workers="auto". Pass a number of workers')
        fields["_get_iterator"] = MethodType(torch_get_iterator if engine == "torch" else get_iterator, twin)
    elif "_get_iterator" in fields:  # of a variant: still bound to the original loader
        fields["_get_iterator"] = MethodType(fields["_get_iterator"].__func__, twin)
    return twin


def _is_dataset(thing: object) -> TypeGuard[Dataset[Sample]]:
    if isinstance(thing, Dataset):
        return True
    return hasattr(thing, "__getitem__") and hasattr(thing, "__len__") and not isinstance(thing, (str, bytes, dict))


def _check(dataset: object, name: str) -> None:
    if isinstance(dataset, IterableDataset):
        return
    try:
        n = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} has no length and is not an IterableDataset, so its samples are unknown") from None
    except Exception as e:
        raise UsageError(f"len({name}) failed: {one_line(e)}") from e
    if n == 0:
        raise UsageError(f"{name} is empty")
