"""Encodes any Python object as a small meta block plus leaves: blocks of bytes that go into a slot.

Pickle protocol 5 (PEP 574) carries the object's structure; tensors and NumPy arrays stay out of the stream and become
leaves. A tensor that is already in the slot (collated there) is not copied. Tensors that overlap in memory still
overlap afterwards; dtypes, strides and ``requires_grad`` are kept, as in torch's own loader. Other tensors (sparse,
quantized, subclasses) are pickled as their class does it, with their storage as a leaf.

Streams are written and read by processes forked from or started by the same parent, so pickle is safe here.
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
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.multiprocessing import reductions as torch_reductions

from ..core.types import Batch
from .arena import ALIGN, aligned
from .mapping import Memory
from .slots import SlotWriter

if TYPE_CHECKING:
    import numpy.typing as npt

TensorRow: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...], int, bool]
"""A tensor leaf: offset, dtype, shape, strides, elements spanned, requires_grad."""
Span: TypeAlias = tuple[int, int]  # a buffer leaf: offset, bytes
Layout: TypeAlias = tuple[torch.dtype, torch.Size, tuple[int, ...]]  # of a tensor: dtype, shape, strides
ONE, LIST = b"1", b"L"  # replace the stream of the two most common batches: a tensor, and a list of tensors
MAX_LAYOUTS = 1000  # layouts remembered on each side
_meta_of_layout: dict[Layout, tuple[bytes, int]] = {}  # for a batch that is one tensor: meta block, bytes of the leaf
_decoded_meta: dict[bytes, tuple[list[TensorRow], list[Span], bytes]] = {}
FOREIGN = ">" if sys.byteorder == "little" else "<"
# torch's loader pickles with the default protocol. Since Python 3.14 that is 5, which keeps the memory order and byte
# order of an array without gaps.
KEEPS_LAYOUT = pickle.DEFAULT_PROTOCOL >= 5
SMALL_ARRAY = 512  # bytes; a smaller array is cheaper in the stream than as a leaf
DTYPES: list[torch.dtype] = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_CODES = {d: i for i, d in enumerate(DTYPES)}
# Reducers that users registered with multiprocessing or copyreg; a live view of both.
_REDUCERS = ChainMap(ForkingPickler._extra_reducers, copyreg.dispatch_table)  # type: ignore[attr-defined]


def _leaf(index: int) -> torch.Tensor:
    """Stands for tensor leaf ``index`` in the stream; ``_BatchUnpickler`` replaces it by ``_view``."""
    raise pickle.UnpicklingError(f"tensor leaf {index} is outside its slot")


def _storage(leaf: torch.Tensor) -> torch.UntypedStorage:
    return leaf.untyped_storage()


def _typed_storage(leaf: torch.Tensor, code: int) -> torch.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=leaf.untyped_storage(), dtype=DTYPES[code], _internal=True)


def _simple(t: torch.Tensor) -> bool:
    return _plain(t) and not t.requires_grad and not t.is_conj() and not t.is_neg()


def _plain(t: torch.Tensor) -> bool:
    is_strided = t.layout is torch.strided and not t.is_quantized and not t.is_nested
    return is_strided and t.device.type == "cpu" and t.dtype in _CODES


def _array(a: npt.NDArray[np.generic]) -> object:
    """Reduces an array so that it arrives with the layout of torch's loader, and writable in any case."""
    if KEEPS_LAYOUT:
        if a.flags.writeable:
            return NotImplemented
        copy = a.copy(order="K")
        dense = a.flags.forc or copy.strides == a.strides  # NumPy itself copies others, in row order
        return copy.__reduce_ex__(5) if dense else NotImplemented
    if a.dtype.byteorder == FOREIGN:
        return a.astype(a.dtype.newbyteorder("="), order="A").__reduce_ex__(5)
    if not (a.flags.writeable and a.flags.forc):  # copied in column order if the array has it, else in row order
        return a.copy(order="A").__reduce_ex__(5)
    return NotImplemented


def _keep(buffers: list[pickle.PickleBuffer], b: pickle.PickleBuffer) -> bool:
    """Keeps an array's buffer out of the stream. Returns True to leave it in."""
    with b.raw() as raw:
        if raw.nbytes < SMALL_ARRAY:
            return True
    buffers.append(b)
    return False


class _BatchPickler(pickle.Pickler):
    """Leaves tensors out of the stream and remembers them in order."""

    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        # Not a method, because a reference cycle would keep the tensors, and so their slot, until it is collected.
        super().__init__(stream, protocol=5, buffer_callback=functools.partial(_keep, buffers))
        self.dispatch_table = _REDUCERS
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: object) -> Any:  # NotImplemented, or what ``__reduce__`` returns
        if type(obj) is torch.Tensor and _plain(obj):
            if obj.requires_grad and not obj.is_leaf:
                torch_reductions.reduce_tensor(obj)  # raises torch's error
            if obj.is_conj() or obj.is_neg():
                obj = obj.resolve_conj().resolve_neg()
            self.tensors.append(obj)
            return _leaf, (len(self.tensors) - 1,)
        if isinstance(obj, torch.storage.TypedStorage) and obj._untyped_storage.device.type == "cpu":
            return _typed_storage, (_bytes_of(obj._untyped_storage), _CODES[obj.dtype])
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            return _storage, (_bytes_of(obj),)
        if isinstance(obj, torch.Tensor) and obj.device.type == "cpu":
            return obj.__reduce_ex__(5)  # the class reduces its attributes; its storages come back here
        if type(obj) is np.ndarray and not obj.dtype.hasobject:
            return _array(obj)
        return NotImplemented


class _BatchUnpickler(pickle.Unpickler):
    def __init__(
        self, stream: io.BytesIO, buffers: Iterable[memoryview], leaves: list[TensorRow], memory: Memory
    ) -> None:
        super().__init__(stream, buffers=buffers)
        # Not a method, because pickle's memo would hold it in a cycle, and the slot until that is collected.
        self._tensor = functools.partial(_view, leaves, memory)

    def find_class(self, module: str, name: str) -> object:
        if name == "_leaf" and module == __name__:
            return self._tensor
        return super().find_class(module, name)


def _view(leaves: list[TensorRow], memory: Memory, index: int) -> torch.Tensor:
    offset, code, shape, strides, span, grad = leaves[index]
    dtype = DTYPES[code]
    if span:
        t = torch.frombuffer(memory, dtype=dtype, count=span, offset=offset)
    else:
        t = torch.empty(0, dtype=dtype, device="cpu")
    if len(shape) != 1 or strides != (1,):
        t.as_strided_(shape, strides)  # in place, because autograd restricts views: detach_(), use after no_grad
    return t.requires_grad_() if grad else t


def _bytes_of(s: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(s, 0, (s.nbytes(),), (1,))


class Encoded:
    """An object split into a meta block and leaves. Call ``place``, then ``write`` or ``blob``."""

    def __init__(self, obj: Batch) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        if type(obj) is torch.Tensor and _simple(obj):
            self._tensors, self._stream = [obj], ONE
        elif type(obj) is list and obj and all(type(t) is torch.Tensor and _simple(t) for t in obj):
            self._tensors, self._stream = obj, LIST
        else:
            stream = io.BytesIO()
            pickler = _BatchPickler(stream, self._buffers)
            pickler.dump(obj)
            self._stream = stream.getvalue()
            self._tensors = pickler.tensors
        self._copies: list[tuple[int, int, int]] = []  # offset, address, bytes
        self._spans: list[Span] = []
        self.meta = b""  # all that ``decode`` needs besides the leaves
        self.size = 0  # bytes from the beginning of the leaves' memory to the end of the last leaf
        self.in_slot = False  # some leaf is already in the slot

    def place(self, slot: SlotWriter | None = None) -> Encoded:
        """Gives every leaf its offset, after the present contents of ``slot``. May be called again for another slot."""
        base, held, self.size = 0, 0, 0
        if slot is None or slot.whole is None:
            if self._stream is ONE and self._place_as_before():
                return self
        else:
            base, held, self.size = slot.address, slot.capacity, slot.used
        self.in_slot = False
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
                    self.in_slot = True
                else:
                    outside.append((at, at + span * t.element_size(), i))
            rows.append((at - base, _CODES[t.dtype], shape, strides, span, t.requires_grad))
        self._copies = []
        if outside:
            self._place_copies(rows, outside)
        self._spans = []
        for b in self._buffers:
            n = b.raw().nbytes
            at = aligned(self.size)
            self.size = at + n
            self._spans.append((at, n))
        table = marshal.dumps((rows, self._spans))
        self.meta = len(table).to_bytes(4, "little") + table + self._stream
        if self._stream is ONE and not base and self._copies:
            if len(_meta_of_layout) >= MAX_LAYOUTS:
                _meta_of_layout.clear()
            t = self._tensors[0]
            _meta_of_layout[t.dtype, t.shape, t.stride()] = (self.meta, self._copies[0][2])
        return self

    def _place_as_before(self) -> bool:
        """Reuses the meta block of an earlier batch with the same layout; small batches mostly have one."""
        t = self._tensors[0]
        known = _meta_of_layout.get((t.dtype, t.shape, t.stride()))
        if known is None:
            return False
        self.meta, self.size = known
        self._copies = [(0, t.data_ptr(), self.size)]
        self.in_slot = False
        return True

    def _place_copies(self, rows: list[TensorRow], outside: list[tuple[int, int, int]]) -> None:
        """Assigns blocks to the leaves outside the slot; leaves that overlap in memory share one."""
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
                block += start % ALIGN  # keeps the alignment of each member
            self.size = block + end - start
            self._copies.append((block, start, end - start))
            for i, lo in members:
                rows[i] = (block + lo - start, *rows[i][1:])

    def write(self, address: int) -> None:
        """Copies the leaves that are not in the slot yet to ``address``, where ``size`` bytes are writable."""
        for at, source, n in self._copies:
            ctypes.memmove(address + at, source, n)
        for (at, n), b in zip(self._spans, self._buffers, strict=True):
            ctypes.memmove(address + at, np.frombuffer(b.raw(), np.uint8).ctypes.data, n)

    def blob(self) -> bytes:
        """Returns meta block and leaves in one piece, for a message that carries both. Requires ``in_slot`` False."""
        if len(self._copies) == 1 and not self._spans and not self._copies[0][0]:
            _, source, n = self._copies[0]
            return self.meta + ctypes.string_at(source, n)
        out = np.zeros(self.size, np.uint8)
        self.write(out.ctypes.data)
        return self.meta + out.tobytes()


def decode(meta: bytes, memory: Memory) -> Batch:
    """Reassembles an object from its ``Encoded.meta`` and a writable buffer that begins with the leaves. Its tensors
    and arrays are views of that buffer and keep it alive."""
    known = _decoded_meta.get(meta)
    if known is None:
        n = 4 + int.from_bytes(meta[:4], "little")
        known = (*marshal.loads(meta[4:n]), bytes(meta[n:]))
        if len(known[2]) == 1:  # only tensors: the next batch of the same layout has the same meta
            if len(_decoded_meta) >= MAX_LAYOUTS:
                _decoded_meta.clear()
            _decoded_meta[meta] = known
    rows, spans, stream = known
    if stream == ONE:
        return _view(rows, memory, 0)
    if stream == LIST:
        return [_view(rows, memory, i) for i in range(len(rows))]
    view = memoryview(memory) if spans else None
    buffers = [view[at : at + size] for at, size in spans] if view is not None else ()
    return _BatchUnpickler(io.BytesIO(stream), buffers, rows, memory).load()
