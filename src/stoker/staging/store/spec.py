"""The type of a sample as JSON, which ``encode`` writes, ``decode`` reads, and caches on disk contain.

A type is a list that begins with one of these tags::

    ["(", [["t", "uint8", [3, 32, 32], [1024, 32, 1]], ["i"]]]        (uint8 tensor of 3x32x32, int)

Named tuples and subclasses of Tensor are recorded by module and name. A class of a script is recorded under the name
under which the script would be imported, so that any run finds it. Classes of stoker are never recorded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Spec: TypeAlias = list[Any]
Leaf: TypeAlias = NDArray[np.uint8]  # the bytes of a value, one-dimensional
Number = TypeVar("Number", bound=np.generic)  # type of a table's values

TENSOR = "t"  # dtype, shape, strides as stored; the sample's strides if they differ
ARRAY = "a"  # dtype, shape, strides in bytes
INT, FLOAT, BOOL = "i", "f", "?"
NUMPY_SCALAR = "g"  # dtype
TEXT, BYTES, NONE = "s", "b", "0"
IMAGE = "P"  # of Pillow: mode, size, info, format
LONG_LIST = "L"  # numbers and strings, or rows of them, as MessagePack: TUPLE if the rows are tuples, else LIST
TUPLE, LIST = "(", "["  # the types of the items
DICT = "{"  # the keys, the types of the values
NAMED_TUPLE = "N"  # the class, the types of the fields
TENSOR_SUBCLASS = "T"  # the class, the type of its ``__dict__``, the type of the tensor
PICKLED = "o"  # the name of the class

_MAIN = ("__main__", "__mp_main__")


def class_name(cls: type) -> str:
    """``module:qualified name`` of a class."""
    module = cls.__module__
    return f"{_import_name(module) if module in _MAIN else module}:{cls.__qualname__}"


def _import_name(main: str) -> str:
    """The name under which the main script would be imported."""
    module = sys.modules.get(main)
    spec = getattr(module, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    return os.path.splitext(os.path.basename(getattr(module, "__file__", None) or main))[0]


def _modules(name: str) -> Iterator[object]:
    yield from (sys.modules[m] for m in _MAIN if m in sys.modules and _import_name(m) == name)
    if name in sys.modules:
        yield sys.modules[name]


def find_class(name: str, base: type = tuple) -> Any:
    """Finds a named tuple, or a subclass of ``base``, that this process has defined or imported; None if there is none.
    Imports nothing, because the name may come from a file."""
    module, _, path = name.partition(":")
    found: object = next(_modules(module), None)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, base):
        return None
    return found if base is not tuple or hasattr(found, "_fields") else None
