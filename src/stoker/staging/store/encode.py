"""Splits a sample into its type (``spec``) and the bytes of its leaves.

Tensors, NumPy arrays and scalars, PIL images, numbers, strings and bytes, in any nesting of tuples, named tuples, lists
and dicts, are restored exactly: type, dtype, shape, strides. Everything else is pickled, which only a cache in the
memory of one process and its workers accepts. Data in a file, in memory shared by ranks, or on another node is never
unpickled.

Not restored: shared memory between two leaves, strides of expanded tensors, read-only flags of arrays, and the file
from which an image was read, with the image's class.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import itertools
import json
import pickle
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Set
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ...core.errors import StokerError
from ...core.types import Sample
from . import spec
from .spec import Leaf, Spec, class_name, find_class

ALIGN = 16  # alignment of leaves in bytes: enough for any dtype
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
SIMPLE_KINDS = "biufc?mMSU"  # kinds of NumPy dtypes that their string describes fully
KEY_TYPES = (str, int, bool, type(None))  # key types of dicts that are not pickled
PLAIN = {int, float, bool, str, type(None)}  # item types of lists stored as a single leaf
LONG = 16  # minimum number of items for a list of these, or of rows of them, to be a single leaf
NO_GRADIENTS = "a sample has a tensor that requires gradients, which flow to what made it"
_PICKLED = re.compile(r'\["o","((?:[^"\\]|\\.)*)"\]')  # spec.PICKLED within a type
_INT64 = range(-(1 << 63), 1 << 63)


COMMON_FORMATS = ("JPEG", "PNG", "BMP", "PPM")  # of pictures whose copies have all that they had
# types of values that a pickle restores in full
RESTORED = {list, tuple, dict, bytes, bytearray, complex, slice, range, type, np.ndarray, torch.Tensor, torch.Size}
RESTORED |= {np.dtype, torch.dtype, types.FunctionType, types.BuiltinFunctionType, types.ModuleType}


class _Kinds(threading.local):
    """Kinds of values taken so far, in this thread, that a copy may not stand for: pickled classes, formats of images,
    palettes; dicts, which may belong to the dataset."""

    def __init__(self) -> None:
        self.taken: set[str] = set()


_kinds = _Kinds()


@contextlib.contextmanager
def kinds_of() -> Iterator[set[str]]:
    """Collects the kinds of the values that are taken inside the ``with``."""
    before, _kinds.taken = _kinds.taken, set()
    try:
        yield _kinds.taken
    finally:
        _kinds.taken = before


class CacheError(StokerError, RuntimeError):
    """A cache that cannot be used: damaged, in another format, or for a sample that cannot be stored."""


class NotRestored(CacheError):
    """A value of which a copy would behave differently."""


def take(sample: Sample, dense: bool = False, pickles: bool = True) -> tuple[str, list[Leaf]]:
    """Returns the type of a sample as JSON, and the bytes of its leaves, as views where possible. ``dense``: stores
    tensors in the order of their dimensions, whatever their strides, so that they can be stacked. Raises CacheError if
    the sample can neither be stored nor pickled, or must not be pickled (``pickles``).

    Example:
        >>> spec, leaves = take((torch.zeros(2, dtype=torch.uint8), 7))
        >>> spec, [x.nbytes for x in leaves]
        ('["(",[["t","uint8",[2],[1]],["i"]]]', [2, 8])
    """
    global _last
    leaves: list[Leaf] = []
    tree = _take(sample, leaves, dense)
    text, last = repr(tree), _last  # compared as text, because True == 1
    if text != last[0]:
        _last = last = text, json.dumps(tree, separators=(",", ":"))
    if not pickles and (found := pickled(last[1])):
        kinds = "tensors, arrays, pictures, numbers, text"
        raise CacheError(
            f"a sample has a {found}, which only an in-memory cache of one process can hold. Other caches hold {kinds}"
        )
    return last[1], leaves


_last = "[]", "[]"  # the last type: most datasets have only one, and json.dumps takes 10 us


def take_known(
    sample: Sample, kinds: Set[str] | None, dense: bool = False, pickles: bool = True
) -> tuple[str, list[Leaf]] | None:
    """As ``take``; None if a copy of the sample may behave differently: it has values of a kind that is not among
    ``kinds``, which a trial has compared. None for any kind."""
    with contextlib.suppress(NotRestored), kinds_of() as found:
        taken = take(sample, dense, pickles)
        return taken if kinds is None or found <= kinds else None
    return None


def pickled(type_spec: str) -> str:
    """The class of a pickled value in samples of this type; "" if none."""
    found = _PICKLED.search(type_spec)
    return found[1] if found else ""


def _take(x: Sample, out: list[Leaf], dense: bool) -> Spec:
    return _ENCODERS.get(type(x), _take_other)(x, out, dense)


def _leaf(out: list[Leaf], data: bytes, *tree: Any) -> Spec:
    """Adds a leaf; ``tree``: its type."""
    out.append(np.frombuffer(data, np.uint8))
    return list(tree)


def _take_dict(x: dict[Any, Sample], out: list[Leaf], dense: bool) -> Spec:
    _kinds.taken.add("dict")
    if not all(type(k) in KEY_TYPES for k in x):
        return _pickled(x, out)
    return [spec.DICT, list(x), [_take(v, out, dense) for v in x.values()]]


def _take_other(x: Sample, out: list[Leaf], dense: bool) -> Spec:
    """Encodes values recognised by their base class; pickles the rest."""
    cls = type(x)
    if isinstance(x, torch.Tensor):
        if _is_simple(x) and find_class(class_name(cls), torch.Tensor) is cls:
            held = _take(x.__dict__, out, dense)  # torchvision's tv_tensors have a format and a canvas size
            return [spec.TENSOR_SUBCLASS, class_name(cls), held, _take_tensor(x.as_subclass(torch.Tensor), out, dense)]
    elif isinstance(x, np.generic):
        if x.dtype.kind in SIMPLE_KINDS and x.dtype.names is None and x.dtype.type is cls:
            return _leaf(out, x.tobytes(), spec.NUMPY_SCALAR, x.dtype.str)
    elif isinstance(x, tuple):
        if hasattr(x, "_fields") and find_class(class_name(cls)) is cls and not getattr(x, "__dict__", None):
            return [spec.NAMED_TUPLE, class_name(cls), [_take(v, out, dense) for v in x]]
    elif "PIL.Image" in sys.modules and isinstance(x, sys.modules["PIL.Image"].Image):
        image = _take_image(x, out)
        if image is not None:
            return image
    return _pickled(x, out)


def _take_long_list(x: list[Any], out: list[Leaf]) -> Spec | None:
    """Encodes a list of numbers and strings, or of rows of them, as tokenizers produce; returns None for others."""
    kind = type(x[0]) if x else None
    in_rows = kind in (tuple, list) and set(map(type, x)) == {kind}
    items = list(itertools.chain.from_iterable(x)) if in_rows else x
    if len(items) < LONG or not PLAIN.issuperset(map(type, items)):
        return None
    with contextlib.suppress(OverflowError, UnicodeError):
        return _leaf(out, msgspec.msgpack.encode(x), spec.LONG_LIST, spec.TUPLE if kind is tuple else spec.LIST)
    return None


def _pickled(x: Sample, out: list[Leaf]) -> Spec:
    file = io.BytesIO()
    try:
        _SamplePickler(file, 5).dump(x)
    except NotRestored:
        raise
    except Exception as e:
        raise CacheError(f"a sample has a {type(x).__name__}, which cannot be cached: {e}") from e
    return _leaf(out, file.getvalue(), spec.PICKLED, type(x).__name__)


class _SamplePickler(pickle.Pickler):
    """Pickles tensors as their bytes, which load in 5 us; torch's own format takes 60 us."""

    def persistent_id(self, x: object) -> None:
        """Called for each object: notes its class."""
        kind = type(x)
        if kind in (set, frozenset):
            again = kind(list(x))  # type: ignore[call-overload]
            if list(again) != list(x) or sys.getsizeof(again) != sys.getsizeof(x):  # type: ignore[call-overload]
                raise NotRestored("a sample has a set whose copy would have another order")
        elif kind not in PLAIN and kind not in RESTORED and not isinstance(x, (type, np.dtype, np.generic)):
            _kinds.taken.add(f"{kind.__module__}.{kind.__qualname__}")

    def reducer_override(self, x: object) -> Any:
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise CacheError(NO_GRADIENTS)
        if type(x) is not torch.Tensor or not _is_simple(x) or not x.is_contiguous() or not x.numel() or x.__dict__:
            return NotImplemented
        return tensor_of, (bytearray(_bytes_of_tensor(x)), x.dtype, tuple(x.shape), x.stride())


def tensor_of(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Returns the tensor with these bytes, which it keeps."""
    return torch.frombuffer(data, dtype=dtype).as_strided(shape, strides)


def _is_simple(t: torch.Tensor) -> bool:
    plain = t.is_cpu and t.layout is torch.strided and not t.is_quantized and not t.requires_grad and not t.is_nested
    return plain and not t.is_conj() and not t.is_neg()


def _take_tensor(t: torch.Tensor, out: list[Leaf], dense: bool) -> Spec:
    if t.__dict__:
        return _pickled(t, out)
    if not _is_simple(t):
        if t.requires_grad:
            raise CacheError(NO_GRADIENTS)
        if not t.is_cpu:
            raise CacheError(
                f"a sample has a tensor on {t.device}, but the cache is in main memory. Move it to the device in "
                "augment"
            )
        return _pickled(t, out)
    tree = [spec.TENSOR, str(t.dtype)[6:], list(t.shape)]
    if not t.is_contiguous():
        strides = t.stride()
        order = sorted(range(t.ndim), key=lambda d: (-strides[d], d))
        if t.permute(order).is_contiguous():  # dense, but in another order
            flat = t.contiguous() if dense else t.permute(order)
            out.append(_bytes_of_tensor(flat))
            return [*tree, list(flat.stride()), list(strides)] if dense else [*tree, list(strides)]
    t = t.contiguous()
    out.append(_bytes_of_tensor(t))
    return [*tree, list(t.stride())]


def _bytes_of_tensor(t: torch.Tensor) -> Leaf:
    flat = t.reshape(-1)
    return flat.view(torch.uint8).numpy() if t.numel() else np.zeros(0, np.uint8)


def _take_array(a: NDArray[Any], out: list[Leaf], dense: bool) -> Spec:
    if a.dtype.kind not in SIMPLE_KINDS or a.dtype.names is not None:
        return _pickled(a, out)
    order = sorted(range(a.ndim), key=lambda d: (-a.strides[d], d))
    flat = a.transpose(order)
    if not flat.flags.c_contiguous or not a.size:
        a = flat = np.ascontiguousarray(a).reshape(a.shape)
    out.append(flat.reshape(-1).view(np.uint8) if a.size else np.zeros(0, np.uint8))
    return [spec.ARRAY, a.dtype.str, list(a.shape), list(a.strides)]


def _take_image(image: Any, out: list[Leaf]) -> Spec | None:
    """Encodes a PIL image without a palette whose ``info`` is plain; returns None for any other."""
    if image.mode in ("P", "PA") or "transparency" in image.info:
        _kinds.taken.add(f"palette {getattr(image.palette, 'mode', '')}")
        return None
    info = repr(image.info)
    if _literal(info) != image.info:
        return None
    if image.format is not None and image.format not in COMMON_FORMATS:
        _kinds.taken.add(f"picture {image.format}")  # which may have more than one frame
    return _leaf(out, image.tobytes(), spec.IMAGE, image.mode, list(image.size), info, image.format)


@functools.lru_cache(maxsize=64)  # mostly the same for all images of a dataset; parsing takes 30 us
def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


_ENCODERS: dict[type, Callable[[Any, list[Leaf], bool], Spec]] = {
    torch.Tensor: _take_tensor,
    np.ndarray: _take_array,
    type(None): lambda x, out, dense: [spec.NONE],
    int: lambda x, out, dense: _leaf(out, np.int64(x).tobytes(), spec.INT) if x in _INT64 else _pickled(x, out),
    float: lambda x, out, dense: _leaf(out, np.float64(x).tobytes(), spec.FLOAT),
    bool: lambda x, out, dense: _leaf(out, bytes([x]), spec.BOOL),
    str: lambda x, out, dense: _leaf(out, x.encode("utf-8", "surrogatepass"), spec.TEXT),
    bytes: lambda x, out, dense: _leaf(out, x, spec.BYTES),
    tuple: lambda x, out, dense: [spec.TUPLE, [_take(v, out, dense) for v in x]],
    list: lambda x, out, dense: _take_long_list(x, out) or [spec.LIST, [_take(v, out, dense) for v in x]],
    dict: _take_dict,
}
