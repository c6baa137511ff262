"""TARGET on the command line: ``path.py:name`` or ``package.module:name``, made into a loader."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import UsageError
from . import BATCH_SIZE

FORM = "TARGET is path.py:name or package.module:name, as in train.py:make_loader"


def find(text: str) -> Any:
    """The object that TARGET names. Its module is imported, under its own name: what a script keeps behind
    ``if __name__ == "__main__"`` is not run.

    Raises:
        UsageError: there is no such file, module or name, or importing it failed.

    Example:
        >>> find("torch.utils.data:TensorDataset").__name__
        'TensorDataset'
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f"{text!r} names nothing to tune: {FORM}")
    try:
        module = _by_path(where) if where.endswith(".py") or os.sep in where else _by_name(where)
    except UsageError:
        raise
    except (Exception, SystemExit) as e:
        raise UsageError(f"importing {where} failed: {type(e).__name__}: {e}") from e
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = [n for n in vars(module) if not n.startswith("_")]
            raise UsageError(f"{where} has no {name!r}; it has {', '.join(public) or 'nothing'}") from None
    return found


def _by_path(path: str) -> Any:
    if not os.path.isfile(path):
        raise UsageError(f"there is no file {path}")
    folder, file = os.path.split(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for a script; and workers that are spawned import it by name
    name = file.removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _by_name(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and (name == e.name or name.startswith(e.name + ".")):
            raise UsageError(f"there is no module {e.name!r}") from None
        raise


def as_loader(thing: Any, batch_size: int | None = None, name: str = "TARGET") -> DataLoader[Any]:
    """A loader over ``thing``: a DataLoader (torch's own or stoker's) as it is, a dataset with a loader around it, or
    a callable without arguments that returns one of both.

    Args:
        thing: the object.
        batch_size: instead of the loader's own; 32 for a dataset.
        name: what errors call it.

    Raises:
        UsageError: it is none of these, or it is empty.
    """
    if not isinstance(thing, (DataLoader, Dataset)) and (isinstance(thing, type) or callable(thing)):
        try:
            thing = thing()
        except Exception as e:
            raise UsageError(f"calling {name}() failed: {type(e).__name__}: {e}") from e
    if isinstance(thing, DataLoader):
        _check(thing.dataset, name)
        return thing if batch_size in (None, thing.batch_size) else rebuilt(thing, batch_size=batch_size)
    if not _is_dataset(thing):
        raise UsageError(f"{name} is {_article(type(thing).__name__)}, neither a Dataset nor a DataLoader")
    _check(thing, name)
    from ..loader import DataLoader as Own

    streams = isinstance(thing, IterableDataset)
    return Own(thing, batch_size=batch_size or BATCH_SIZE, shuffle=None if streams else True)


def rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A loader like ``loader``, of its own class where that can be, with some arguments changed.

    Raises:
        UsageError: a loader with a batch sampler of its own has no batch size to change.
    """
    if "batch_size" in changes and loader.batch_size is None:
        raise UsageError("the loader makes its own batches (batch_size=None or a batch_sampler): their size is its own")
    kw: dict[str, Any] = {
        "batch_size": loader.batch_size,
        "collate_fn": loader.collate_fn,
        "drop_last": loader.drop_last,
        "num_workers": loader.num_workers,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        **changes,
    }
    if not isinstance(loader.dataset, IterableDataset):
        kw["sampler"] = loader.sampler
    from ..loader import DataLoader as Own

    cls: Any = Own if isinstance(loader, Own) else DataLoader
    return cls(loader.dataset, **kw)  # type: ignore[no-any-return]


def _is_dataset(thing: Any) -> bool:
    if isinstance(thing, Dataset):
        return True
    return hasattr(thing, "__getitem__") and hasattr(thing, "__len__") and not isinstance(thing, (str, bytes, dict))


def _check(dataset: Any, name: str) -> None:
    if isinstance(dataset, IterableDataset):
        return
    try:
        n = len(dataset)
    except TypeError:
        raise UsageError(f"{name} has no length and is no IterableDataset: nothing says which samples it has") from None
    if n == 0:
        raise UsageError(f"{name} is empty")


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
