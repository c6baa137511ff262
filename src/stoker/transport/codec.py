"""Any Python object as a small meta block plus leaves: blocks of bytes that go into a slot.

Pickle protocol 5 (PEP 574) carries the object's skeleton; tensors and NumPy arrays are left out of the stream and
travel as leaves. A tensor that already lies in the slot (collated there) is not copied. Tensors that overlap in
memory go on overlapping; dtypes, strides and ``requires_grad`` are kept, as torch's own loader keeps them. What is
no plain CPU tensor (sparse, quantized, a subclass) goes the way its class pickles itself, its storage as a leaf.

Streams are written and read by processes that forked from, or were started by, the same parent: pickle is safe here.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import io
import marshal
import pickle
import sys
from collections import ChainMap
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from .arena import ALIGN, aligned
from .slots import SlotWriter

# A tensor leaf: offset, dtype, shape, strides, elements spanned, requires_grad. A buffer leaf: offset, length.
TensorRow = tuple[int, int, tuple[int, ...], tuple[int, ...], int, bool]
ONE, LIST = b"1", b"L"  # instead of a stream, for the two commonest batches: a tensor, and a list of tensors
MANY = 1000  # looks of batches to remember, on each side
_metas: dict[tuple[Any, ...], tuple[bytes, int]] = {}
_tables: dict[bytes, Any] = {}
FOREIGN = ">" if sys.byteorder == "little" else "<"
SMALL_ARRAY = 512  # bytes; a smaller array is cheaper in the stream than as a leaf
DTYPES: list[torch.dtype] = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_CODES = {d: i for i, d in enumerate(DTYPES)}
# What users registered for their types, with multiprocessing or with copyreg. A live view on both.
_REDUCERS = ChainMap(ForkingPickler._extra_reducers, copyreg.dispatch_table)  # type: ignore[attr-defined]


def _leaf(index: int) -> torch.Tensor:
    """Stands in the stream for tensor leaf ``index``; ``_Unpickler`` binds it to the slot at hand."""
    raise pickle.UnpicklingError(f"tensor leaf {index} outside of a slot")


def _storage(leaf: torch.Tensor) -> torch.UntypedStorage:
    return leaf.untyped_storage()


def _typed_storage(leaf: torch.Tensor, code: int) -> Any:
    return torch.storage.TypedStorage(wrap_storage=leaf.untyped_storage(), dtype=DTYPES[code], _internal=True)


def _simple(t: torch.Tensor) -> bool:
    return _plain(t) and not t.requires_grad and not t.is_conj() and not t.is_neg()


def _plain(t: torch.Tensor) -> bool:
    return (
        t.layout is torch.strided
        and t.device.type == "cpu"
        and not t.is_quantized
        and not t.is_nested
        and t.dtype in _CODES
    )


def _keep(buffers: list[pickle.PickleBuffer], b: pickle.PickleBuffer) -> bool:
    """Keeps an array out of the stream; True leaves it in."""
    with b.raw() as raw:
        if raw.nbytes < SMALL_ARRAY:
            return True
    buffers.append(b)
    return False


class _Pickler(pickle.Pickler):
    """Leaves tensors out of the stream and remembers them in order."""

    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        # Not a method: that would be a cycle, and the tensors would hold their slot until it is collected.
        super().__init__(stream, protocol=5, buffer_callback=functools.partial(_keep, buffers))
        self.dispatch_table = _REDUCERS
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _plain(obj):
            if obj.requires_grad and not obj.is_leaf:
                raise RuntimeError(
                    "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not "
                    "support crossing process boundaries.  If you just want to transfer the data, call detach() on "
                    "the tensor before serializing (e.g., putting it on the queue)."
                )
            return _leaf, (self._add(obj),)
        if isinstance(obj, torch.storage.TypedStorage) and obj._untyped_storage.device.type == "cpu":
            return _typed_storage, (_bytes_of(obj._untyped_storage), _CODES[obj.dtype])
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            return _storage, (_bytes_of(obj),)
        if isinstance(obj, torch.Tensor) and obj.device.type == "cpu":
            return obj.__reduce_ex__(5)  # the class knows what it carries; its storages come back here
        if type(obj) is np.ndarray and obj.dtype.byteorder == FOREIGN:
            native = obj.astype(obj.dtype.newbyteorder("="), order="A")
            return native.__reduce_ex__(5)  # as pickle's older protocols do, so torch
        if type(obj) is np.ndarray and not (obj.flags.writeable and obj.flags.forc) and not obj.dtype.hasobject:
            # A batch is writable, whatever its samples were. By columns where it is so, else by rows, as torch's pickle
            # protocol lays it; NumPy's fifth keeps other orders.
            return obj.copy(order="A").__reduce_ex__(5)
        return NotImplemented

    def _add(self, t: torch.Tensor) -> int:
        if t.is_conj() or t.is_neg():
            t = t.resolve_conj().resolve_neg()
        self.tensors.append(t)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, buffers: Iterable[Any], leaves: list[TensorRow], memory: Any) -> None:
        super().__init__(stream, buffers=buffers)
        # Not a method: pickle's memo would hold it, it the unpickler, and so the slot until the cycle is collected.
        self._tensor = functools.partial(_view, leaves, memory)

    def find_class(self, module: str, name: str) -> Any:
        if name == "_leaf" and module == __name__:
            return self._tensor
        return super().find_class(module, name)


def _view(leaves: list[TensorRow], memory: Any, index: int) -> torch.Tensor:
    offset, code, shape, strides, span, grad = leaves[index]
    dtype = DTYPES[code]
    if span:
        t = torch.frombuffer(memory, dtype=dtype, count=span, offset=offset)
    else:
        t = torch.empty(0, dtype=dtype, device="cpu")
    if len(shape) != 1 or strides != (1,):
        t.as_strided_(shape, strides)  # in place: a view, to autograd, may neither be detached nor outlive no_grad
    return t.requires_grad_() if grad else t


def _bytes_of(s: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(s, 0, (s.nbytes(),), (1,))


def _look(t: torch.Tensor) -> tuple[Any, ...]:
    return t.dtype, t.shape, t.stride()


class Encoded:
    """An object taken apart: a meta block and leaves, each with its place. Lay it out, then write it.

    Attributes:
        meta: bytes; what ``decode`` needs beside the leaves.
        size: bytes that the leaves take, counted from the beginning of their memory.
        inside: some leaf lies in the slot already.
    """

    def __init__(self, obj: Any) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        if type(obj) is torch.Tensor and _simple(obj):
            self._tensors, self._stream = [obj], ONE
        elif type(obj) is list and obj and all(type(t) is torch.Tensor and _simple(t) for t in obj):
            self._tensors, self._stream = obj, LIST
        else:
            stream = io.BytesIO()
            pickler = _Pickler(stream, self._buffers)
            pickler.dump(obj)
            self._stream = stream.getvalue()
            self._tensors = pickler.tensors
        self._copies: list[tuple[int, int, int]] = []  # place, address, bytes
        self._spans: list[tuple[int, int]] = []
        self.meta = b""
        self.size = 0
        self.inside = False

    def lay(self, slot: SlotWriter | None = None) -> Encoded:
        """Gives every leaf its place, behind what ``slot`` holds already. May be called again for another slot."""
        base, held, self.size = 0, 0, 0
        if slot is None or slot.whole is None:
            if self._stream is ONE and self._known():
                return self
        else:
            base, held, self.size = slot.address, slot.capacity, slot.used
        self.inside = False
        rows: list[TensorRow] = []
        outside: list[tuple[int, int, int]] = []
        for i, t in enumerate(self._tensors):
            shape, strides, at = tuple(t.shape), t.stride(), t.data_ptr()
            span = 0
            if t.numel():
                span = 1
                for n, step in zip(shape, strides, strict=True):
                    span += (n - 1) * step
                if base <= at < base + held:
                    self.inside = True
                else:
                    outside.append((at, at + span * t.element_size(), i))
            rows.append((at - base, _CODES[t.dtype], shape, strides, span, t.requires_grad))
        self._copies = []
        if outside:
            self._place(rows, outside)
        self._spans = []
        for b in self._buffers:
            n = b.raw().nbytes
            at = aligned(self.size)
            self.size = at + n
            self._spans.append((at, n))
        table = marshal.dumps((rows, self._spans))
        self.meta = len(table).to_bytes(4, "little") + table + self._stream
        if self._stream is ONE and not base and self._copies:
            if len(_metas) >= MANY:
                _metas.clear()
            _metas[_look(self._tensors[0])] = (self.meta, self._copies[0][2])
        return self

    def _known(self) -> bool:
        """Small batches mostly look like the one before: then there is nothing to work out."""
        t = self._tensors[0]
        known = _metas.get(_look(t))
        if known is None:
            return False
        self.meta, self.size = known
        self._copies = [(0, t.data_ptr(), self.size)]
        self.inside = False
        return True

    def _place(self, rows: list[TensorRow], outside: list[tuple[int, int, int]]) -> None:
        """Blocks for the leaves that are not in the slot; leaves that overlap in memory share one."""
        outside.sort()
        groups: list[tuple[int, int, list[tuple[int, int]]]] = []
        for lo, hi, i in outside:
            if groups and lo < groups[-1][1]:
                start, end, members = groups[-1]
                members.append((i, lo))
                groups[-1] = (start, max(end, hi), members)
            else:
                groups.append((lo, hi, [(i, lo)]))
        for start, end, members in groups:
            block = aligned(self.size)
            if len(members) > 1:
                block += start % ALIGN  # each of them as aligned as it was
            self.size = block + end - start
            self._copies.append((block, start, end - start))
            for i, lo in members:
                rows[i] = (block + lo - start, *rows[i][1:])

    def write(self, address: int) -> None:
        """Copies the leaves that are not there yet to ``address``, where ``size`` bytes are writable."""
        for at, source, n in self._copies:
            ctypes.memmove(address + at, source, n)
        for (at, n), b in zip(self._spans, self._buffers, strict=True):
            ctypes.memmove(address + at, np.frombuffer(b.raw(), np.uint8).ctypes.data, n)

    def blob(self) -> bytes:
        """Meta and leaves in one piece, for a message that carries both. Only where nothing is ``inside``."""
        if len(self._copies) == 1 and not self._spans and not self._copies[0][0]:
            _, source, n = self._copies[0]
            return self.meta + ctypes.string_at(source, n)
        out = np.zeros(self.size, np.uint8)
        self.write(out.ctypes.data)
        return self.meta + out.tobytes()


def decode(meta: bytes, memory: Any) -> Any:
    """Puts an object together again. Its tensors and arrays are views on ``memory`` and hold it.

    Args:
        meta: an ``Encoded.meta``.
        memory: a writable buffer with the leaves at its beginning.
    """
    known = _tables.get(meta)
    if known is None:
        n = 4 + int.from_bytes(meta[:4], "little")
        known = (*marshal.loads(meta[4:n]), bytes(meta[n:]))
        if len(known[2]) == 1:  # nothing but tensors: the next batch of the same look has the same meta
            if len(_tables) >= MANY:
                _tables.clear()
            _tables[meta] = known
    rows, spans, stream = known
    if stream == ONE:
        return _view(rows, memory, 0)
    if stream == LIST:
        return [_view(rows, memory, i) for i in range(len(rows))]
    view = memoryview(memory) if spans else None
    buffers = [view[at : at + size] for at, size in spans] if view is not None else ()
    return _Unpickler(io.BytesIO(stream), buffers, rows, memory).load()
