"""A sample as plain leaves: what it is made of, in JSON-able words, and the bytes of each leaf.

Tensors, NumPy arrays and scalars, PIL images, numbers, strings and bytes, in any nesting of tuples, named tuples, lists
and dicts, come back as they were: type, dtype, shape, strides. What else there is goes through pickle, which only a
cache in this run's own memory takes: a file is never unpickled. What does not come back: that two leaves were one and
the same memory, strides that were no order of the bytes (``expand``), that an array could not be written, and the file
that an image was read from (its class, its ``format``).
"""

from __future__ import annotations

import ast
import functools
import json
import pickle
import re
import sys
from typing import Any

import numpy as np
import torch

from ...core.errors import StokerError
from .names import class_of, name_of

ALIGN = 16  # bytes between leaves: enough for any dtype
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
SIMPLE = "biufc?mMSU"  # kinds of NumPy dtypes that their string says everything about
_INT64 = range(-(1 << 63), 1 << 63)
KEYS = (str, int, bool, type(None))


class CacheError(StokerError, RuntimeError):
    """A cache that cannot be used: damaged, of another format, or of a sample that cannot be kept."""


MANY = 16  # numbers or words from which on a list of them, or of rows of them, is kept as one array a column
NUMBERS = {int: "<i8", float: "<f8", bool: "?"}
Leaf = Any  # a uint8 array of one dimension


def take(sample: Any, dense: bool = False) -> tuple[str, list[Leaf]]:
    """What a sample is made of, as JSON, and the bytes of its leaves, which are views where that can be.

    Args:
        sample: any object.
        dense: tensors lie in the order of their dimensions, whatever their strides, so that they can be stacked.

    Example:
        >>> words, leaves = take((torch.zeros(2, dtype=torch.uint8), 7))
        >>> words, [x.nbytes for x in leaves]
        ('["(",[["t","uint8",[2],[1]],["i"]]]', [2, 8])
    """
    global _last
    leaves: list[Leaf] = []
    made = _take(sample, leaves, dense)
    said, last = repr(made), _last  # compared as text: True is 1 for ==
    if said != last[0]:
        _last = last = said, json.dumps(made, separators=(",", ":"))
    return last[1], leaves


_last = "[]", "[]"  # samples of a dataset are mostly of one make, and json.dumps costs 10 us


def _take(x: Any, out: list[Leaf], dense: bool) -> list[Any]:
    kind = type(x)
    if kind is torch.Tensor:
        return _take_tensor(x, out, dense) if not x.__dict__ else _pickled(x, out)
    if kind is np.ndarray and x.dtype.kind in SIMPLE and x.dtype.names is None:
        return _take_array(x, out)
    if kind is int and x in _INT64:
        return _number(np.int64(x), "i", out)
    if kind is float:
        return _number(np.float64(x), "f", out)
    if kind is bool:
        return _number(np.uint8(x), "?", out)
    if x is None:
        return ["0"]
    if isinstance(x, torch.Tensor) and _simple(x) and class_of(name_of(kind), torch.Tensor) is kind:
        held = _take(x.__dict__, out, dense)  # torchvision's tv_tensors keep a format, a canvas' size
        return ["T", name_of(kind), held, _take_tensor(x.as_subclass(torch.Tensor), out, dense)]
    if kind is str:
        out.append(np.frombuffer(x.encode("utf-8", "surrogatepass"), np.uint8))
        return ["s"]
    if kind is bytes:
        out.append(np.frombuffer(x, np.uint8))
        return ["b"]
    if kind is tuple:
        return ["(", [_take(v, out, dense) for v in x]]
    if kind is list:
        many = _take_many(x, out) if len(x) >= MANY else None
        many = many or _take_rows(x, out)
        return many or ["[", [_take(v, out, dense) for v in x]]
    if kind is dict and all(type(k) in KEYS for k in x):
        return ["{", list(x), [_take(v, out, dense) for v in x.values()]]
    if isinstance(x, np.generic) and x.dtype.kind in SIMPLE and x.dtype.names is None and x.dtype.type is kind:
        return [*_number(x, "g", out), x.dtype.str]
    if isinstance(x, tuple) and hasattr(x, "_fields") and class_of(name_of(kind)) is kind and not _dressed_up(x):
        return ["N", name_of(kind), [_take(v, out, dense) for v in x]]
    if "PIL.Image" in sys.modules and isinstance(x, sys.modules["PIL.Image"].Image):
        words = _take_image(x, out)
        if words is not None:
            return words
    return _pickled(x, out)


def _take_many(x: list[Any], out: list[Leaf]) -> list[Any] | None:
    """A list of numbers or of words, as tokenisers make them: one leaf, or two."""
    first = type(x[0])
    if first not in NUMBERS and first is not str:
        return None
    if len(set(map(type, x))) > 1:
        return None
    if first is str:
        parts = [v.encode("utf-8", "surrogatepass") for v in x]
        out.append(np.array([len(part) for part in parts], "<i8").view(np.uint8))
        out.append(np.frombuffer(b"".join(parts), np.uint8))
        return ["S", len(x)]
    try:
        numbers = np.array(x, NUMBERS[first])
    except OverflowError:
        return None
    out.append(numbers.view(np.uint8))
    return ["M", first.__name__, len(x)]


def _take_rows(x: list[Any], out: list[Leaf]) -> list[Any] | None:
    """A list of rows of one length, such as boxes or lines of a table: a leaf or two for each column."""
    kind, width = type(x[0]) if x else None, 0
    if kind is tuple or kind is list:
        width = len(x[0])
    if len(x) * width < MANY or set(map(type, x)) != {kind} or set(map(len, x)) != {width}:
        return None
    leaves: list[Leaf] = []
    columns = [_take_many(list(column), leaves) for column in zip(*x, strict=True)]
    if None in columns:
        return None
    out += leaves
    return ["R", "(" if kind is tuple else "[", columns]


def _dressed_up(x: Any) -> bool:
    return bool(getattr(x, "__dict__", None))


def _pickled(x: Any, out: list[Leaf]) -> list[Any]:
    try:
        out.append(np.frombuffer(pickle.dumps(x, protocol=5), np.uint8))
    except Exception as e:
        raise CacheError(f"a sample has a {type(x).__name__}, which cannot be kept: {e}") from e
    return ["o", type(x).__name__]


def foreign(words: str) -> str | None:
    """The type of what is pickled in a sample of this make, which a file does not keep."""
    found = re.search(r'\["o","((?:[^"\\]|\\.)*)"\]', words)
    return found[1] if found else None


def _number(x: Any, word: str, out: list[Leaf]) -> list[Any]:
    out.append(np.frombuffer(x.tobytes(), np.uint8))
    return [word]


def _simple(t: torch.Tensor) -> bool:
    plain = t.is_cpu and t.layout is torch.strided and not t.is_quantized and not t.requires_grad and not t.is_nested
    return plain and not t.is_conj() and not t.is_neg()


def _take_tensor(t: torch.Tensor, out: list[Leaf], dense: bool) -> list[Any]:
    if not _simple(t):
        if not t.is_cpu:
            raise CacheError(f"a sample has a tensor on {t.device}; what is kept lies in memory: move it in augment")
        return _pickled(t, out)
    words = ["t", str(t.dtype)[6:], list(t.shape)]
    if not t.is_contiguous():
        strides = t.stride()
        order = sorted(range(t.ndim), key=lambda d: (-strides[d], d))
        if t.permute(order).is_contiguous():  # dense, in another order
            flat = t.contiguous() if dense else t.permute(order)
            out.append(_bytes(flat))
            return [*words, list(flat.stride()), list(strides)] if dense else [*words, list(strides)]
    t = t.contiguous()
    out.append(_bytes(t))
    return [*words, list(t.stride())]


def _bytes(t: torch.Tensor) -> Leaf:
    flat = t.reshape(-1)
    return flat.view(torch.uint8).numpy() if t.numel() else np.zeros(0, np.uint8)


def _take_array(a: np.ndarray[Any, Any], out: list[Leaf]) -> list[Any]:
    order = sorted(range(a.ndim), key=lambda d: (-a.strides[d], d))
    flat = a.transpose(order)
    if not flat.flags.c_contiguous or not a.size:
        a = flat = np.ascontiguousarray(a).reshape(a.shape)
    out.append(flat.reshape(-1).view(np.uint8) if a.size else np.zeros(0, np.uint8))
    return ["a", a.dtype.str, list(a.shape), list(a.strides)]


def _take_image(image: Any, out: list[Leaf]) -> list[Any] | None:
    """A PIL image without a palette; what lies in ``info`` is kept where it is plain."""
    if image.mode in ("P", "PA") or "transparency" in image.info:
        return None
    info = repr(image.info)
    if _literal(info) != image.info:
        return None
    out.append(np.frombuffer(image.tobytes(), np.uint8))
    return ["P", image.mode, list(image.size), info]


@functools.lru_cache(maxsize=64)  # the images of a dataset mostly say the same, and to read it takes 30 us
def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
