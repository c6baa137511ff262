"""torch's collate, straight into a slot.

``default_collate`` stays torch's own code; only the function it calls for tensors is exchanged in the worker process
(``default_collate_fn_map`` is torch's documented place for that), so structure, types and errors cannot differ, and a
user's collate function that calls ``default_collate`` inside gets the slot too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from .transport.record import INLINE
from .transport.ring import ALIGN, SlotWriter

_stock = torch_collate.default_collate_fn_map[torch.Tensor]


def sample_size(sample: Any) -> tuple[int, int]:
    """Bytes and leaves of one sample: what each sample adds to a batch, and how many blocks the batch will have."""
    if isinstance(sample, torch.Tensor):
        return sample.numel() * sample.element_size(), 1
    if isinstance(sample, np.ndarray):
        return sample.nbytes, 1
    if isinstance(sample, (str, bytes)):
        return 0, 0
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, Sequence):
        sizes = [sample_size(v) for v in sample]
        return sum(n for n, _ in sizes), sum(k for _, k in sizes)
    return 8, 1  # a number becomes an int64 or a float64


class SlotCollate:
    """Calls the user's collate function with a slot at hand for what ``default_collate`` stacks.

    Args:
        collate_fn: the loader's.
        writer: the worker's arena.
        batched: whether the function gets a list of samples (auto-collation).
    """

    def __init__(self, collate_fn: Callable[[Any], Any], writer: SlotWriter, batched: bool) -> None:
        self._fn = collate_fn
        self._writer = writer
        self._batched = batched
        self._exact = collate_fn is torch_collate.default_collate
        self.expected = 0
        self.spent_ns = 0

    def __call__(self, data: Any) -> Any:
        began = time.perf_counter_ns()
        try:
            if self._batched:
                nbytes = self.expected
                if self._exact and isinstance(data, list) and data:
                    size, leaves = sample_size(data[0])
                    nbytes = size * len(data)
                    if nbytes > INLINE:
                        nbytes += (leaves + 1) * ALIGN
                if nbytes > INLINE:
                    self._writer.take(nbytes)
            return self._fn(data)
        finally:
            self.spent_ns = time.perf_counter_ns() - began

    def stack(self, batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        """What ``default_collate`` calls for tensors: torch.stack into the slot, or into fresh memory.

        ``out=`` is given in both cases, because torch gives it too: it decides which mixtures of dtypes and which
        tensors that require grad are errors.
        """
        elem = batch[0]
        if type(elem) is not torch.Tensor or not elem.is_cpu or elem.layout is not torch.strided or elem.is_nested:
            return _stock(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
        if elem.is_quantized:
            return _stock(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
        out = torch.empty(0, dtype=elem.dtype)
        writer = self._writer
        if writer.whole is not None:
            count = elem.numel() * len(batch)
            at = writer.room(count * elem.element_size()) if count else None
            if at is not None:
                out = torch.frombuffer(writer.whole, dtype=elem.dtype, count=count, offset=at)
                out = out.view(len(batch), *elem.shape)
        try:
            return torch.stack(batch, 0, out=out)  # type: ignore[arg-type]
        except Exception:
            pass
        return _stock(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]  # raises as torch does

    def install(self) -> None:
        """Makes ``default_collate`` in this process use ``stack``. For worker processes only."""
        torch_collate.default_collate_fn_map[torch.Tensor] = self.stack
