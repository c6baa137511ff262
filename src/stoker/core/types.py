"""Type names for user objects that pass through stoker, and the parts of a ``DataLoader`` that stoker reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

Sample: TypeAlias = Any  # what ``dataset[index]`` returns: any object
Batch: TypeAlias = Any  # what a collate function returns: any object
Index: TypeAlias = Any  # what a sampler yields for one sample: an int, or any key of the dataset
State: TypeAlias = Any  # what the ``state_dict()`` of a user's object returns
JsonObject: TypeAlias = dict[str, Any]  # an object of a JSON document
Attributes: TypeAlias = dict[str, Any]  # an object's ``__dict__``, keyword arguments, a function's globals


class MapDataset(Protocol):
    """A map-style dataset."""

    def __getitem__(self, index: Index, /) -> Sample: ...

    def __len__(self) -> int: ...


class LoaderLike(Protocol):
    """The attributes that ``torch.utils.data.DataLoader``, its subclasses and ``stoker.DataLoader`` share."""

    dataset: Any
    batch_size: int | None
    num_workers: int
    prefetch_factor: int | None
    collate_fn: Callable[..., Batch]
    sampler: Any
    batch_sampler: Any
    generator: Any
    drop_last: bool
    timeout: float
    pin_memory: bool
    pin_memory_device: str
    persistent_workers: bool
    worker_init_fn: Any
    _dataset_kind: int
    _iterator: Any

    @property
    def multiprocessing_context(self) -> Any: ...

    @property
    def _auto_collation(self) -> bool: ...

    @property
    def _index_sampler(self) -> Any: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int: ...
