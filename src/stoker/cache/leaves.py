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
import itertools
import json
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import StokerError
from .names import class_of, name_of

ALIGN = 16  # bytes between leaves: enough for any dtype
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_SIMPLE = "biufc?mMSU"  # kinds of NumPy dtypes that their string says everything about
_INT64 = range(-(1 << 63), 1 << 63)
_KEYS = (str, int, bool, type(None))


class CacheError(StokerError, RuntimeError):
    """A cache that cannot be used: damaged, of another format, or of a sample that cannot be kept."""


MANY = 16  # numbers or words from which on a list of them, or of rows of them, is kept as one array a column
_MANY = {int: "<i8", float: "<f8", bool: "?"}
Leaf = Any  # a uint8 array of one dimension


@functools.cache
def _image_bytes(mode: str, width: int) -> int:
    """Bytes of one line of a PIL image."""
    from PIL import Image

    return len(Image.new(mode, (width, 1)).tobytes())


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
    last, words = _last
    if made != last or repr(made) != repr(last):  # True is 1 for ==
        words = json.dumps(made, separators=(",", ":"))
        _last = made, words
    return words, leaves


_last: tuple[list[Any], str] = [], "[]"  # samples of a dataset are mostly of one make, and json.dumps costs 10 us


def _take(x: Any, out: list[Leaf], dense: bool) -> list[Any]:
    kind = type(x)
    if kind is torch.Tensor:
        return _take_tensor(x, out, dense) if not x.__dict__ else _pickled(x, out)
    if kind is np.ndarray and x.dtype.kind in _SIMPLE and x.dtype.names is None:
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
    if kind is dict and all(type(k) in _KEYS for k in x):
        return ["{", list(x), [_take(v, out, dense) for v in x.values()]]
    if isinstance(x, np.generic) and x.dtype.kind in _SIMPLE and x.dtype.names is None and x.dtype.type is kind:
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
    if first not in _MANY and first is not str:
        return None
    if len(set(map(type, x))) > 1:
        return None
    if first is str:
        parts = [v.encode("utf-8", "surrogatepass") for v in x]
        out.append(np.array([len(part) for part in parts], "<i8").view(np.uint8))
        out.append(np.frombuffer(b"".join(parts), np.uint8))
        return ["S", len(x)]
    try:
        numbers = np.array(x, _MANY[first])
    except OverflowError:
        return None
    out.append(numbers.view(np.uint8))
    return ["M", first.__name__, len(x)]


def _take_rows(x: list[Any], out: list[Leaf]) -> list[Any] | None:
    """A list of rows as long as each other, as boxes or lines of a table are: a leaf or two for each column."""
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


def stored_copy(sample: Any) -> Any:
    """What comes back of a sample that is kept: an image that was read from a file, say, is a plain one."""
    words, leaves = take(sample)
    return Layout(words).put([x.copy() for x in leaves])


class Layout:
    """How samples of one make are put together again from the bytes of their leaves.

    Args:
        words: what ``take`` said.
        trusted: whether pickled leaves may be read; not from a file.

    Attributes:
        sizes: bytes of each leaf; None for one that has another size in each sample.
        fixed: every leaf has one size, so samples of this make are rows of arrays.
        stacks: every leaf is a tensor, an array or a number, so a batch is one gather from each column.
        dtypes, shapes, strides: of leaves that are tensors or arrays, or numbers; None for others.

    Raises:
        CacheError: no such words.
    """

    def __init__(self, words: str, trusted: bool = True) -> None:
        self.words, self._trusted = words, trusted
        self.sizes: list[int | None] = []
        self.dtypes: list[torch.dtype | None] = []
        self.shapes: list[tuple[int, ...]] = []
        self.strides: list[tuple[int, ...] | None] = []
        try:
            self._tree = json.loads(words)
            self._make = self._maker(self._tree)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as e:
            raise CacheError(f"no words for a sample: {words[:200]!r} ({type(e).__name__}: {e})") from e
        self.fixed = all(n is not None for n in self.sizes)
        self.stacks = (
            self.fixed
            and None not in self.dtypes
            and None not in self.strides
            and 0 not in self.sizes
            and _stacks(self._tree)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of a sample whose leaves all have one size, as it lies in columns."""
        return sum(n or 0 for n in self.sizes)

    def put(self, leaves: Sequence[Leaf]) -> Any:
        """The sample. Its memory is its own."""
        return self._make(leaves)

    def batch(self, columns: Sequence[Any]) -> Any:
        """What ``default_collate`` makes of samples whose leaves are ``columns``: tensors, one for each leaf."""
        return self._batch(self._tree, iter(columns))

    def _batch(self, tree: Any, columns: Any) -> Any:
        word = tree[0]
        if word in ("(", "["):
            return [self._batch(v, columns) for v in tree[1]]
        if word == "{":
            return {k: self._batch(v, columns) for k, v in zip(tree[1], tree[2], strict=True)}
        if word == "N":
            return class_of(tree[1])(*(self._batch(v, columns) for v in tree[2]))
        return next(columns)

    def _leaf(self, size: int | None, dtype: Any = None, shape: Any = (), strides: Any = None) -> int:
        self.sizes.append(size)
        self.dtypes.append(dtype)
        self.shapes.append(tuple(shape))
        self.strides.append(strides)
        return len(self.sizes) - 1

    def _maker(self, tree: Any) -> Callable[[Sequence[Leaf]], Any]:
        word = tree[0]
        if word == "(":
            parts = [self._maker(v) for v in tree[1]]
            return lambda x: tuple([make(x) for make in parts])
        if word == "[":
            parts = [self._maker(v) for v in tree[1]]
            return lambda x: [make(x) for make in parts]
        if word == "{":
            named = [(_key(k), self._maker(v)) for k, v in zip(tree[1], tree[2], strict=True)]
            return lambda x: {k: make(x) for k, make in named}
        if word == "R":
            columns = [self._maker(v) for v in tree[2]]
            row: Any = {"(": tuple, "[": list}[tree[1]]
            return lambda x: list(map(row, zip(*[make(x) for make in columns], strict=True)))
        if word == "N":
            cls = class_of(str(tree[1]))
            if cls is None or len(cls._fields) != len(tree[2]):
                raise KeyError(f"there is no named tuple {tree[1]!r} in this run")
            parts, name = [self._maker(v) for v in tree[2]], str(tree[1])
            return lambda x: class_of(name)(*[make(x) for make in parts])  # a notebook may have made it anew
        if word == "0":
            return lambda x: None
        if word == "T":
            if class_of(str(tree[1]), torch.Tensor) is None or tree[3][0] != "t":
                raise KeyError(f"there is no kind of tensor {tree[1]!r} in this run")
            held, data, kind = self._maker(tree[2]), self._maker(tree[3]), str(tree[1])
            return lambda x: _dressed(data(x), class_of(kind, torch.Tensor), held(x))
        return self._leaf_maker(word, tree)

    def _leaf_maker(self, word: str, tree: Any) -> Callable[[Sequence[Leaf]], Any]:
        if word == "t":
            return self._tensor(_DTYPES[tree[1]], _naturals(tree[2]), *map(_naturals, tree[3:5]))
        if word == "a":
            return self._array(np.dtype(tree[1]), _naturals(tree[2]), tuple(int(n) for n in tree[3]))
        if word in "if?g" and len(word) == 1:
            dtype = np.dtype({"i": "<i8", "f": "<f8", "?": "u1"}[word] if word != "g" else tree[1])
            if dtype.kind not in _SIMPLE:
                raise KeyError(str(dtype))
            kind: Any = {"i": int, "f": float, "?": bool, "g": dtype.type}[word]
            torches = {"i": torch.int64, "f": torch.float64, "?": torch.bool, "g": _torch_dtype(dtype)}[word]
            j = self._leaf(dtype.itemsize, torches, (), ())
            if word == "g":
                return lambda x: np.frombuffer(x[j].tobytes(), dtype)[0]
            return lambda x: kind(x[j].view(dtype)[0])
        if word == "s":
            j = self._leaf(None)
            return lambda x: str(memoryview(x[j]), "utf-8", "surrogatepass")
        if word == "b":
            j = self._leaf(None)
            return lambda x: x[j].tobytes()
        if word == "M":
            numbers = np.dtype({kind.__name__: kept for kind, kept in _MANY.items()}[tree[1]])
            (n,) = _naturals(tree[2:])
            j = self._leaf(n * numbers.itemsize)
            return lambda x: x[j].view(numbers).tolist()
        if word == "S":
            (n,) = _naturals(tree[1:])
            j, k = self._leaf(8 * n), self._leaf(None)
            return lambda x: _texts(x[j].view("<i8").tolist(), memoryview(x[k]))
        if word == "P":
            return self._image(str(tree[1]), _naturals(tree[2]), ast.literal_eval(tree[3]))
        if word == "o" and self._trusted:
            j = self._leaf(None)
            return lambda x: pickle.loads(x[j])
        raise KeyError(f"{word!r} is no word for a leaf")

    def _tensor(self, dtype: torch.dtype, shape: Any, strides: Any, own: Any = None) -> Callable[[Sequence[Leaf]], Any]:
        numel = int(np.prod(shape, dtype=np.int64))
        _within(shape, strides, numel)
        j = self._leaf(numel * dtype.itemsize, dtype, shape, strides)
        if not numel:
            return lambda x: torch.empty_strided(shape, strides, dtype=dtype)
        if own is None:
            return lambda x: torch.frombuffer(x[j].copy(), dtype=dtype).as_strided_(shape, strides)
        _within(shape, own, numel)

        def make(x: Sequence[Leaf]) -> torch.Tensor:
            dense = torch.from_numpy(x[j].copy()).view(dtype).as_strided(shape, strides)
            return torch.empty_strided(shape, own, dtype=dtype).copy_(dense)

        return make

    def _array(self, dtype: Any, shape: Any, strides: Any) -> Callable[[Sequence[Leaf]], Any]:
        if dtype.kind not in _SIMPLE:
            raise KeyError(str(dtype))
        numel = int(np.prod(shape, dtype=np.int64))
        if dtype.itemsize:
            _within(shape, [s // dtype.itemsize for s in strides], numel)
        j = self._leaf(numel * dtype.itemsize, _torch_dtype(dtype), shape)
        if strides == _c_strides(shape, dtype.itemsize):
            self.strides[j] = tuple(s // max(1, dtype.itemsize) for s in strides)
        return lambda x: np.ndarray(shape, dtype, x[j].copy(), 0, strides)

    def _image(self, mode: str, size: Any, info: dict[Any, Any]) -> Callable[[Sequence[Leaf]], Any]:
        from PIL import Image

        if len(size) != 2:
            raise KeyError(f"an image of {len(size)} sizes")
        j = self._leaf(_image_bytes(mode, 8) * -(-size[0] // 8) * size[1] if mode == "1" else None)
        if mode != "1":
            self.sizes[j] = _image_bytes(mode, 1) * size[0] * size[1]

        def make(x: Sequence[Leaf]) -> Any:
            image = Image.frombytes(mode, size, x[j])  # copies; any buffer will do
            image.info = dict(info)
            return image

        return make


def _texts(sizes: list[int], text: Any) -> list[str]:
    ends = list(itertools.accumulate(sizes))
    return [str(text[end - n : end], "utf-8", "surrogatepass") for n, end in zip(sizes, ends, strict=True)]


def _dressed(t: torch.Tensor, kind: Any, held: Any) -> torch.Tensor:
    out: torch.Tensor = t.as_subclass(kind)
    out.__dict__.update(held)
    return out


def _stacks(tree: Any) -> bool:
    if tree[0] in ("(", "["):
        return all(map(_stacks, tree[1]))
    if tree[0] in ("{", "N"):
        return all(map(_stacks, tree[2]))
    return tree[0] in ("t", "a", "i", "f", "?", "g")


def _key(k: Any) -> Any:
    if type(k) not in _KEYS:
        raise KeyError(f"{k!r} is no key")
    return k


def _naturals(values: Any) -> tuple[int, ...]:
    out = tuple(values)
    if not all(type(v) is int and v >= 0 for v in out):
        raise KeyError(f"{values!r}: sizes are whole numbers")
    return out


def _within(shape: Any, strides: Any, numel: int) -> None:
    """A file's words must not make a tensor look past its own memory."""
    if len(strides) != len(shape) or any(s < 0 for s in strides):
        raise KeyError(f"strides {strides!r} for the shape {shape!r}")
    if numel and sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) >= numel:
        raise KeyError(f"strides {strides!r} reach past {numel} values")


def _c_strides(shape: Any, itemsize: int) -> tuple[int, ...]:
    out, n = [], itemsize
    for size in reversed(shape):
        out.append(n)
        n *= max(1, size)
    return tuple(reversed(out))


def _torch_dtype(dtype: Any) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.zeros(1, dtype)).dtype
    except (TypeError, ValueError):  # no such dtype, or another byte order
        return None


@functools.lru_cache(maxsize=4096)  # images of any size have as many makes as sizes
def layout(words: str, trusted: bool) -> Layout:
    """The layout of a make; one object for each."""
    return Layout(words, trusted)
