"""Makes torch's ``default_collate`` stack tensors directly into a slot.

``default_collate`` itself is torch's own. The worker replaces only the function that it calls for tensors
(``default_collate_fn_map``, torch's documented hook), so structure, types and errors are the same. A user's collate
function that calls ``default_collate`` also uses the slot.
"""

from __future__ import annotations

import math
import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from ..core.packages import is_users
from ..core.types import Batch, Sample
from ..transport.arena import ALIGN
from ..transport.messages import INLINE

if TYPE_CHECKING:
    from ..transport.slots import SlotWriter
    from ..transport.thread_slots import HeapWriter

CollateMap: TypeAlias = dict[type | tuple[type, ...], Callable[..., Batch]]
CollateFn: TypeAlias = Callable[[list[Sample] | Sample], Batch]
"""Called with the samples of a batch, or with one sample if the loader makes no batches."""
_stock: Callable[..., torch.Tensor] = torch_collate.collate_tensor_fn  # the user may have put another into the map
_here = threading.local()


def maps_are_own() -> bool:
    """Whether ``default_collate`` calls no function of the user's: one that the script put into torch's map."""
    return not any(_is_users(fn) for fn in torch_collate.default_collate_fn_map.values())


def _is_users(fn: object) -> bool:
    code = getattr(fn, "__code__", None)
    return code is None or is_users(code.co_filename)


def _dispatch(batch: Sequence[torch.Tensor], *, collate_fn_map: CollateMap | None = None) -> torch.Tensor:
    """Calls torch's own function, except in worker threads that have a slot."""
    collate = getattr(_here, "collate", None)
    stack = _stock if collate is None else collate.stack
    return stack(batch, collate_fn_map=collate_fn_map)


def sample_size(sample: Sample) -> tuple[int, int]:
    """Returns a sample's size in bytes and its number of leaves: how many blocks the batch will have."""
    if isinstance(sample, torch.Tensor):
        return sample.numel() * sample.element_size(), 1
    if isinstance(sample, np.ndarray):
        return sample.nbytes, 1
    if isinstance(sample, UserDict):
        sample = sample.data
    # Base-class methods: a subclass may compute its items when they are read, which must not happen twice.
    if isinstance(sample, dict):
        inner: Iterable[Sample] = dict.values(sample)
    elif isinstance(sample, list):
        inner = list.__iter__(sample)
    elif isinstance(sample, tuple):
        inner = tuple.__iter__(sample)
    elif isinstance(sample, (str, bytes, Mapping, Sequence)):
        return 0, 0
    else:
        return 8, 1  # a number becomes an int64 or a float64
    sizes = [sample_size(v) for v in inner]
    return sum(n for n, _ in sizes), sum(k for _, k in sizes)


def empty(shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns an uninitialised tensor for part of the batch that is being made.

    In a worker, its memory is part of the slot from which the batch is read, so it is not copied again. Elsewhere this
    is ``torch.empty``. For use in collate functions and ``augment_batch``.

    Args:
        shape: of the tensor.
        dtype: of the tensor; None for torch's default.

    Example:
        >>> def augment_batch(batch):
        ...     images, labels = batch  # uint8
        ...     return torch.div(images, 255, out=empty(images.shape)), labels
        >>> augment_batch((torch.full((1, 2), 51, dtype=torch.uint8), torch.tensor([3])))
        (tensor([[0.2000, 0.2000]]), tensor([3]))
    """
    dtype = dtype or torch.get_default_dtype()
    collate = getattr(_here, "collate", None)
    if collate is None:
        return torch.empty(tuple(shape), dtype=dtype)
    return collate.empty(tuple(shape), dtype)  # type: ignore[no-any-return]


class SlotCollate:
    """Calls the user's collate function with a slot for the tensors that ``default_collate`` stacks."""

    def __init__(self, collate_fn: CollateFn, writer: SlotWriter | HeapWriter, batched: bool) -> None:
        self.fn = collate_fn
        self.writer = writer
        self._batched = batched
        stacks = torch_collate.default_collate_fn_map[torch.Tensor] in (_stock, _dispatch)
        self._exact = collate_fn is torch_collate.default_collate and stacks
        self.expected = 0
        self.spent_ns = 0

    def __call__(self, data: list[Sample] | Sample) -> Batch:
        began = time.perf_counter_ns()
        try:
            if self._batched:
                nbytes = self.expected
                if self._exact and type(data) is list and data:
                    if type(data[0]) is torch.Tensor and data[0].numel() * len(data) * data[0].element_size() <= INLINE:
                        return self.stack(data)  # what default_collate would call in the end
                    size, leaves = sample_size(data[0])
                    nbytes = size * len(data)
                    if nbytes > INLINE:
                        nbytes += (leaves + 1) * ALIGN
                if nbytes > INLINE:
                    self.writer.take(nbytes)
            return self.fn(data)
        finally:
            self.spent_ns = time.perf_counter_ns() - began

    def finish(self) -> int:
        """Hands the slot over to a batch that was made in this process. Returns the bytes in the slot."""
        nbytes = self.writer.used if self.writer.whole is not None else 0
        self.expected = max(nbytes, self.expected - self.expected // 16)
        self.writer.sent()
        return nbytes

    def stack(self, batch: Sequence[torch.Tensor], *, collate_fn_map: CollateMap | None = None) -> torch.Tensor:
        """Stacks tensors for ``default_collate``, into the slot if there is one. torch's workers always stack into an
        ``out`` of the first sample's dtype, so other dtypes and samples that require grad are errors, and the batch is
        contiguous. Passes other kinds of tensors to torch's own function."""
        elem = batch[0]
        if type(elem) is torch.Tensor and elem.is_cpu and elem.layout is torch.strided and not elem.is_nested:
            try:
                place = self._place(len(batch), elem.dtype, elem.shape)
                out = torch.stack(batch, 0, out=place)  # type: ignore[arg-type]
                if out.dtype is elem.dtype and not out.requires_grad:
                    return out.contiguous()
            except Exception:
                pass
        return _stock(batch, collate_fn_map=collate_fn_map)

    def select(self, tables: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
        """Returns these rows of each table, in the slot if there is one."""
        sizes = [len(rows) * t.numel() // max(1, len(t)) * t.element_size() for t in tables]
        if sum(sizes) > INLINE:
            self.writer.take(sum(sizes) + (len(tables) + 1) * ALIGN)
        try:
            return [torch.index_select(t, 0, rows, out=self._place(len(rows), t.dtype, t.shape[1:])) for t in tables]
        except Exception:
            self.writer.cancel()  # the fallback loop takes its own slot
            raise

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns memory for a tensor of the batch, in the slot if there is room."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self.writer.whole is None and nbytes > INLINE:
            self.writer.take(max(self.expected, nbytes + 2 * ALIGN))
        out = self._place(1, dtype, torch.Size(shape))
        return torch.empty(shape, dtype=dtype) if out is None else out[0]

    def _place(self, count: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor | None:
        """Returns memory for ``count`` samples in the slot; None if there is no slot, or no room in it."""
        numel = count * math.prod(shape)
        at = self.writer.room(numel * dtype.itemsize) if numel else None
        if at is None:
            return None
        return torch.frombuffer(self.writer.whole, dtype=dtype, count=numel, offset=at).view(count, *shape)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Calls ``install`` for as long as this thread, which is not a worker, makes batches."""
        before = getattr(_here, "collate", None)
        self.install()
        try:
            yield
        finally:
            _here.collate = before

    def install(self) -> None:
        """Makes ``default_collate`` use ``stack`` in this thread, unless other code has replaced that function."""
        _here.collate = self
        if torch_collate.default_collate_fn_map[torch.Tensor] is _stock:
            torch_collate.default_collate_fn_map[torch.Tensor] = _dispatch
