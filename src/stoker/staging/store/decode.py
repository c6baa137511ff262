"""Rebuilds samples from the bytes of their leaves: the inverse of ``encode``."""

from __future__ import annotations

import ast
import functools
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from ...core.errors import one_line
from ...core.types import Batch, Sample
from . import spec
from .encode import DTYPES, KEY_TYPES, SIMPLE_KINDS, CacheError, take
from .spec import Leaf, Spec, find_class

Shape: TypeAlias = tuple[int, ...]
Make: TypeAlias = Callable[[Sequence[Leaf]], Any]  # builds a value from all leaves of a sample


class UnknownClass(CacheError):
    """A type has a class that this process has not defined."""


def stored_copy(sample: Sample) -> Sample:
    """Returns the sample as a cache would return it: an image read from a file, for example, becomes a plain image."""
    type_spec, leaves = take(sample)
    return layout(type_spec, True).put(leaves)


class Layout:
    """How to rebuild samples of one type from the bytes of their leaves. Raises CacheError if the type is invalid, or
    its classes are not defined in this process. ``pickles``: the type may contain pickled values."""

    def __init__(self, type_spec: str, pickles: bool = True) -> None:
        self.type_spec = type_spec  # as returned by ``take``
        self.sizes: list[int | None] = []  # bytes of each leaf; None if the size varies between samples
        self.dtypes: list[torch.dtype | None] = []  # of leaves that are tensors, arrays or numbers
        self.shapes: list[Shape] = []
        self.strides: list[Shape | None] = []
        self._makers: dict[str, Callable[[Spec], Make]] = {
            spec.TUPLE: self._tuple,
            spec.LIST: self._list,
            spec.DICT: self._dict,
            spec.NAMED_TUPLE: self._named_tuple,
            spec.TENSOR: self._tensor,
            spec.TENSOR_SUBCLASS: self._tensor_subclass,
            spec.ARRAY: self._array,
            spec.INT: lambda tree: self._number(np.dtype("<i8"), torch.int64, int),
            spec.FLOAT: lambda tree: self._number(np.dtype("<f8"), torch.float64, float),
            spec.BOOL: lambda tree: self._number(np.dtype("u1"), torch.bool, bool),
            spec.NUMPY_SCALAR: self._numpy_scalar,
            spec.NONE: lambda tree: lambda leaves: None,
            spec.TEXT: lambda tree: self._variable(lambda leaf: str(leaf.data, "utf-8", "surrogatepass")),
            spec.BYTES: lambda tree: self._variable(lambda leaf: leaf.tobytes()),
            spec.LONG_LIST: lambda tree: self._variable(_rows if tree[1] == spec.TUPLE else _plain),
            spec.IMAGE: self._image,
        }
        if pickles:  # then only this process and its workers can have written them
            self._makers[spec.PICKLED] = lambda tree: self._variable(lambda leaf: pickle.loads(leaf.data))
        try:
            self._tree: Spec = json.loads(type_spec)
            self._make = self._maker(self._tree)
        except UnknownClass:
            raise
        except Exception as e:  # anybody may have written it
            raise CacheError(f"invalid sample type: {type_spec[:200]!r} ({one_line(e)})") from e
        self._makers.clear()  # they reference this object: avoids a cycle
        self.fixed = all(n is not None for n in self.sizes)  # so samples of this type can be rows of columns
        dense = None not in self.dtypes and None not in self.strides and 0 not in self.sizes
        self.stacks = self.fixed and dense and _stacks(self._tree)  # so a batch is one gather from each column

    @property
    def nbytes(self) -> int:
        """Bytes of a sample in columns, if all leaves have a fixed size."""
        return sum(n or 0 for n in self.sizes)

    def put(self, leaves: Sequence[Leaf]) -> Sample:
        """Builds the sample, in memory of its own."""
        return self._make(leaves)

    def batch(self, columns: Sequence[torch.Tensor]) -> Batch:
        """The result of ``default_collate`` for samples whose leaves are ``columns``: one tensor per leaf."""
        return _batch(self._tree, iter(columns))

    def _maker(self, tree: Spec) -> Make:
        return self._makers[tree[0]](tree)

    def _leaf(
        self, size: int | None, dtype: torch.dtype | None = None, shape: Shape = (), strides: Shape | None = None
    ) -> int:
        """Records the next leaf. Returns its number."""
        self.sizes.append(size)
        self.dtypes.append(dtype)
        self.shapes.append(shape)
        self.strides.append(strides)
        return len(self.sizes) - 1

    # -- containers

    def _tuple(self, tree: Spec) -> Make:
        items = [self._maker(item) for item in tree[1]]
        return lambda leaves: tuple([make(leaves) for make in items])

    def _list(self, tree: Spec) -> Make:
        items = [self._maker(item) for item in tree[1]]
        return lambda leaves: [make(leaves) for make in items]

    def _dict(self, tree: Spec) -> Make:
        items = [(_key(k), self._maker(v)) for k, v in zip(tree[1], tree[2], strict=True)]
        return lambda leaves: {k: make(leaves) for k, make in items}

    def _named_tuple(self, tree: Spec) -> Make:
        name = str(tree[1])
        cls = find_class(name)
        if cls is None or len(cls._fields) != len(tree[2]):
            raise UnknownClass(f"this process has no named tuple {name!r}")
        fields = [self._maker(field) for field in tree[2]]
        return lambda leaves: find_class(name)(*[make(leaves) for make in fields])  # a notebook may redefine it

    def _tensor_subclass(self, tree: Spec) -> Make:
        name = str(tree[1])
        if find_class(name, torch.Tensor) is None:
            raise UnknownClass(f"this process has no Tensor subclass {name!r}")
        if tree[3][0] != spec.TENSOR:
            raise KeyError(f"{name!r} does not consist of a tensor")
        held, data = self._maker(tree[2]), self._maker(tree[3])

        def make(leaves: Sequence[Leaf]) -> torch.Tensor:
            out: torch.Tensor = data(leaves).as_subclass(find_class(name, torch.Tensor))
            out.__dict__.update(held(leaves))
            return out

        return make

    # -- leaves

    def _tensor(self, tree: Spec) -> Make:
        dtype, shape, strides = DTYPES[tree[1]], _naturals(tree[2]), _naturals(tree[3])
        wanted = _naturals(tree[4]) if len(tree) > 4 else strides  # the sample's strides, if it was stored densely
        numel = int(np.prod(shape, dtype=np.int64))
        _check_strides(shape, strides, numel)
        _check_strides(shape, wanted, numel)
        j = self._leaf(numel * dtype.itemsize, dtype, shape, strides)
        if not numel:
            return lambda leaves: torch.empty_strided(shape, strides, dtype=dtype)
        if wanted == strides:
            return lambda leaves: torch.frombuffer(leaves[j].copy(), dtype=dtype).as_strided_(shape, strides)

        def make(leaves: Sequence[Leaf]) -> torch.Tensor:
            dense = torch.from_numpy(leaves[j].copy()).view(dtype).as_strided(shape, strides)
            return torch.empty_strided(shape, wanted, dtype=dtype).copy_(dense)

        return make

    def _array(self, tree: Spec) -> Make:
        dtype, shape, strides = _simple(tree[1]), _naturals(tree[2]), tuple(int(n) for n in tree[3])
        numel = int(np.prod(shape, dtype=np.int64))
        if dtype.itemsize:
            _check_strides(shape, [s // dtype.itemsize for s in strides], numel)
        j = self._leaf(numel * dtype.itemsize, _torch_dtype(dtype), shape)
        if strides == tuple(n * dtype.itemsize for n in torch.empty(shape, device="meta").stride()):
            self.strides[j] = tuple(s // max(1, dtype.itemsize) for s in strides)
        return lambda leaves: np.ndarray(shape, dtype, leaves[j].copy(), 0, strides)

    def _number(self, dtype: np.dtype[Any], torch_dtype: torch.dtype, kind: type[int | float]) -> Make:
        j = self._leaf(dtype.itemsize, torch_dtype, (), ())
        return lambda leaves: kind(leaves[j].view(dtype)[0])

    def _numpy_scalar(self, tree: Spec) -> Make:
        dtype = _simple(tree[1])
        j = self._leaf(dtype.itemsize, _torch_dtype(dtype), (), ())
        return lambda leaves: np.frombuffer(leaves[j].tobytes(), dtype)[0]

    def _variable(self, make: Callable[[Leaf], Any]) -> Make:
        """Adds a leaf whose size varies between samples."""
        j = self._leaf(None)
        return lambda leaves: make(leaves[j])

    def _image(self, tree: Spec) -> Make:
        from PIL import Image

        mode, size, info = str(tree[1]), _naturals(tree[2]), ast.literal_eval(tree[3])
        file_format = None if len(tree) < 5 or tree[4] is None else str(tree[4])
        width, height = size
        if mode == "1":  # eight pixels per byte
            j = self._leaf(_line_bytes(mode, 8) * -(-width // 8) * height)
        else:
            j = self._leaf(_line_bytes(mode, 1) * width * height)

        def make(leaves: Sequence[Leaf]) -> Image.Image:
            image = Image.new(mode, (width, height), None)  # uninitialized
            if width and height:
                image.frombytes(leaves[j])  # makes a copy
            image.info = dict(info)
            if file_format is not None:
                image.format = file_format
            return image

        return make


def _plain(leaf: Leaf) -> Any:
    return msgspec.msgpack.decode(leaf.data)


def _rows(leaf: Leaf) -> Any:
    return list(map(tuple, _plain(leaf)))


@functools.lru_cache(maxsize=4096)  # images of varying sizes have one type per size
def layout(type_spec: str, pickles: bool) -> Layout:
    """The ``Layout`` of a type; cached."""
    return Layout(type_spec, pickles)


def _batch(tree: Spec, columns: Iterator[torch.Tensor]) -> Batch:
    tag = tree[0]
    if tag in (spec.TUPLE, spec.LIST):
        return [_batch(item, columns) for item in tree[1]]
    if tag == spec.DICT:
        return {k: _batch(v, columns) for k, v in zip(tree[1], tree[2], strict=True)}
    if tag == spec.NAMED_TUPLE:
        return find_class(tree[1])(*(_batch(field, columns) for field in tree[2]))
    return next(columns)


def _stacks(tree: Spec) -> bool:
    if tree[0] in (spec.TUPLE, spec.LIST):
        return all(map(_stacks, tree[1]))
    if tree[0] in (spec.DICT, spec.NAMED_TUPLE):
        return all(map(_stacks, tree[2]))
    return tree[0] in (spec.TENSOR, spec.ARRAY, spec.INT, spec.FLOAT, spec.BOOL, spec.NUMPY_SCALAR)


@functools.cache
def _line_bytes(mode: str, width: int) -> int:
    from PIL import Image

    return len(Image.new(mode, (width, 1)).tobytes())


def _key(k: object) -> object:
    if type(k) not in KEY_TYPES:
        raise KeyError(f"{k!r} cannot be a dict key")
    return k


def _simple(descr: str) -> np.dtype[Any]:
    dtype = np.dtype(descr)
    if dtype.kind not in SIMPLE_KINDS:
        raise KeyError(str(dtype))
    return dtype


def _naturals(values: Sequence[int]) -> Shape:
    out = tuple(values)
    if not all(type(v) is int and v >= 0 for v in out):
        raise KeyError(f"{values!r}: sizes must be non-negative integers")
    return out


def _check_strides(shape: Shape, strides: Sequence[int], numel: int) -> None:
    """Checks strides, because a type from a file must not make a tensor read beyond its own memory."""
    if len(strides) != len(shape) or any(s < 0 for s in strides):
        raise KeyError(f"strides {strides!r} do not fit shape {shape!r}")
    if numel and sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) >= numel:
        raise KeyError(f"strides {strides!r} exceed {numel} values")


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.zeros(1, dtype)).dtype
    except (TypeError, ValueError):  # no such dtype in torch, or another byte order
        return None
