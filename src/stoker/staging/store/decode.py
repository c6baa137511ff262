"""Samples put together again from the bytes of their leaves: see ``leaves``, which takes them apart."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .encode import DTYPES, KEYS, NUMBERS, SIMPLE, CacheError, Leaf, take
from .names import class_of


@functools.cache
def _image_bytes(mode: str, width: int) -> int:
    """Bytes of one line of a PIL image."""
    from PIL import Image

    return len(Image.new(mode, (width, 1)).tobytes())


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
            return self._tensor(DTYPES[tree[1]], _naturals(tree[2]), *map(_naturals, tree[3:5]))
        if word == "a":
            return self._array(np.dtype(tree[1]), _naturals(tree[2]), tuple(int(n) for n in tree[3]))
        if word in "if?g" and len(word) == 1:
            dtype = np.dtype({"i": "<i8", "f": "<f8", "?": "u1"}[word] if word != "g" else tree[1])
            if dtype.kind not in SIMPLE:
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
            numbers = np.dtype({kind.__name__: kept for kind, kept in NUMBERS.items()}[tree[1]])
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
        if dtype.kind not in SIMPLE:
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
    if type(k) not in KEYS:
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
