"""Looks into a dataset, by the paths of its attributes: what is big, what changed."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import enum
import functools
import itertools
import pathlib
import sys
import types
import zlib
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from . import packages

DEPTH = 8  # a Subset of a Subset of a dataset with a Compose of transforms with arguments
NODES = 20_000  # that one look takes in
FEWER = 2_000  # objects that are looked through for one of a kind
WHOLE = 10_000  # plain items of a container that are compared as a whole
WIDTH = 200  # attributes or items of one object that are looked at
SAMPLES = (64, 16, 8, 4)  # items of a container by which it is estimated, by how deep it lies
ARRAY_BYTES = 1 << 16
PLAIN = (bool, int, float, complex, str, bytes, type(None))
VALUES = (
    torch.dtype,
    torch.device,
    np.generic,
    range,
    slice,
    pathlib.PurePath,
    enum.Enum,
    datetime.date,
    decimal.Decimal,
)
MANY = (list, tuple, dict, set, frozenset, deque)
CODE = (types.FunctionType, types.MethodType, functools.partial)  # what these hold has no name that other code mentions
RECORDS = ("argparse", "types")  # of Python's modules; what others hold is how they work: locks, loggers, generators


class Big(NamedTuple):
    """A container of many small objects.

    Attributes:
        path: where it is: ``dataset.samples``.
        words: ``a list of 2,000,000 dicts``.
        nbytes: about how much memory its objects take.
        remedy: what keeps it in one buffer: ``stoker.share(dataset.samples)``.
    """

    path: str
    words: str
    nbytes: int
    remedy: str


def _of(cls: type) -> str:
    """The package that it is of."""
    return str(cls.__module__).partition(".")[0]


@functools.cache
def _pythons(package: str) -> bool:
    """It is of the standard library, and not somebody's ``test`` or ``profile``."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return package in sys.stdlib_module_names and (file is None or packages.in_stdlib(file))


def _told(package: str) -> bool:
    return package in RECORDS or not _pythons(package)


def _inside(obj: Any) -> Iterator[tuple[str, Any]]:
    """Attributes and items of an object, each with what it adds to a path; its class's first."""
    if isinstance(obj, dict):
        for k, v in list(obj.items())[:WIDTH]:
            yield f"[{k!r}]", v
    elif isinstance(obj, (list, tuple)):
        for i, v in enumerate(obj[:WIDTH]):
            yield f"[{i}]", v
    elif hasattr(type(obj), "_looked"):
        yield from obj._looked()  # of this package: what its user said, not how it works
    elif isinstance(obj, functools.partial):
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    elif isinstance(obj, types.MethodType):
        yield from ((".__func__", obj.__func__), (".__self__", obj.__self__))
    elif isinstance(obj, types.FunctionType):
        yield from ((".__defaults__", obj.__defaults__), (".__kwdefaults__", obj.__kwdefaults__))
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # nothing in it yet
                yield f".{name}", cell.cell_contents
    elif not isinstance(obj, (type, types.ModuleType, torch.Tensor)) and _told(_of(type(obj))):
        own = dict(itertools.islice(attributes(obj).items(), WIDTH))
        for c in reversed(type(obj).__mro__):
            if _of(c) != "torch" and not _pythons(_of(c)):
                for k, v in list(vars(c).items())[:WIDTH]:
                    if k not in own and k[:2] != "__" and type(v) in (*PLAIN, *MANY):
                        yield f".{k}", v
        for k, v in own.items():
            yield f".{k}", v


def reached(obj: Any, names: set[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Objects that can be reached by attributes and items, each with its path; no values, arrays or tensors.

    Args:
        obj: to begin at.
        names: attributes that are followed; None: all.
    """
    waiting: list[tuple[str, Any, int]] = [("dataset", obj, DEPTH)]
    seen: set[int] = set()
    while waiting and len(seen) < FEWER:
        path, x, depth = waiting.pop()
        if id(x) not in seen and not isinstance(x, (*PLAIN, *VALUES, np.ndarray, torch.Tensor)):
            seen.add(id(x))
            yield path, x
            if depth:
                waiting += [(path + step, v, depth - 1) for step, v in _inside(x) if _is_read(x, step, names)]


def _is_read(obj: Any, step: str, names: set[str] | None) -> bool:
    """Whether a step from an object leads to what code reads that mentions some names; None: any."""
    return names is None or step[0] != "." or step[1:] in names or isinstance(obj, CODE)


def attributes(obj: Any) -> dict[str, Any]:
    """What an object holds in its ``__dict__`` and its slots. No code of its class runs."""
    out: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # somebody's proxy
        out.update(getattr(obj, "__dict__", {}))
    for c in type(obj).__mro__:
        for name, slot in vars(c).items() if "__slots__" in vars(c) else ():
            if type(slot) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # nothing in it yet
                    out.setdefault(name, slot.__get__(obj))
    return out


def big(obj: Any, at_least: int, path: str = "dataset") -> list[Big]:
    """Containers of many small Python objects inside ``obj`` that take ``at_least`` bytes, and tables of such.

    Reading such an object writes its reference count, so a forked worker copies its page; an array of numbers has one
    count for all. What they take is estimated by a few items of each.
    """
    return _big(obj, at_least, path, DEPTH, set(), [])


def _big(obj: Any, at_least: int, path: str, depth: int, seen: set[int], alive: list[Any]) -> list[Big]:
    if type(obj) in PLAIN or id(obj) in seen or not depth or len(seen) > NODES:
        return []
    seen.add(id(obj))
    alive.append(obj)  # else another object might have its id
    own: list[Big] = []
    if isinstance(obj, MANY) or _of_objects(obj):
        nbytes = _weight(obj)
        if nbytes < at_least or not len(obj):
            return []
        own = [Big(path, _named(obj), nbytes, f"stoker.share({_listed(obj, path)})")]
        if len(obj) > WIDTH or not isinstance(obj, (list, tuple, dict)):
            return own
    elif _of(type(obj)) == "pandas":
        return _frame(obj, at_least, path)
    return [
        b for step, inner in _inside(obj) for b in _big(inner, at_least, path + step, depth - 1, seen, alive)
    ] or own


def _of_objects(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.hasobject and x.ndim > 0


def _listed(obj: Any, path: str) -> str:
    """What ``share`` takes, of a container."""
    if isinstance(obj, np.ndarray):
        return f"{path}.tolist()"
    if isinstance(obj, (set, frozenset)):
        return f"sorted({path})"
    return f"list({path})" if isinstance(obj, deque) else path


def _frame(frame: Any, at_least: int, path: str) -> list[Big]:
    """A table of pandas: its columns of objects."""
    try:
        columns = [frame] if frame.ndim == 1 else [frame.iloc[:, i] for i in range(min(WIDTH, frame.shape[1]))]
        arrays = [c.to_numpy() for c in columns if c.dtype == object]
        nbytes = sum(_weight(a) for a in arrays if _of_objects(a))
        n, kind = len(frame), type(frame).__name__
    except Exception:  # an index, a group, another pandas
        return []
    remedy = f"stoker.share({path}.tolist())" if kind == "Series" else f"stoker.share({path}.to_dict('records'))"
    return [Big(path, f"a {kind} of {n:,} rows with objects in it", nbytes, remedy)] if nbytes >= at_least else []


def _some(obj: Any, most: int) -> list[Any]:
    """A few of its items; of a dict keys and values are one."""
    if isinstance(obj, np.ndarray):
        obj = obj.reshape(-1) if obj.flags.c_contiguous else obj[..., 0] if obj.ndim > 1 else obj
    if isinstance(obj, (list, tuple, np.ndarray)):
        return list(obj[:: max(1, len(obj) // most)][:most])
    return list(itertools.islice(obj.items() if isinstance(obj, dict) else obj, most))


def _named(obj: Any) -> str:
    some = _some(obj, SAMPLES[0])
    kinds = {type(x[1] if isinstance(obj, dict) else x).__name__ for x in some}
    of = f"{kinds.pop()}s" if len(kinds) == 1 else "objects"
    if isinstance(obj, np.ndarray):
        return f"an array of {obj.size:,} {of}"
    return f"{'an' if type(obj).__name__[0] in 'AEIOaeio' else 'a'} {type(obj).__name__} of {len(obj):,} {of}"


def _weight(obj: Any, deep: int = 0) -> int:
    """About how many bytes an object takes, with all in it that is its own."""
    if isinstance(obj, torch.Tensor) or (isinstance(obj, np.ndarray) and not _of_objects(obj)):
        return 200  # the object; its numbers are not copied
    size = sys.getsizeof(obj, 64)
    if deep == len(SAMPLES):
        return size
    if isinstance(obj, MANY) or _of_objects(obj):
        some = _some(obj, SAMPLES[deep])
        if not some:
            return size
        parts = [[*x] if isinstance(obj, dict) else [x] for x in some]
        each = {id(x): x for part in parts for x in part}
        new = sum(_weight(x, deep + 1) for x in each.values())
        if len(some) > 8 and len({id(part[-1]) for part in parts}) * 2 < len(some) and not isinstance(obj, dict):
            return new  # the same few, again and again: labels, None
        return size + int(new / len(some) * (obj.size if isinstance(obj, np.ndarray) else len(obj)))
    if type(obj).__module__ != "builtins" and not isinstance(obj, (type, types.ModuleType)):
        own = attributes(obj)
        size += sum(_weight(v, deep + 1) for v in own.values()) + (100 if own else 0)
    return size


class Fingerprint:
    """What a dataset looked like, to say later what changed: plain values, tensors, arrays, containers, code.

    It is a look and no proof: tensors over 64 kB are known by where they lie, arrays over 64 kB and containers of more
    than 10,000 items by their size and some of their values.

    Args:
        obj: the dataset.
        path: its name.
        names: attributes that count; None: all.
        skip: paths that do not count, nor what lies below them.
        shared: memory that processes share counts, too.
    """

    def __init__(
        self,
        obj: Any,
        path: str = "dataset",
        names: set[str] | None = None,
        *,
        skip: Collection[str] = (),
        shared: bool = True,
    ) -> None:
        self._path, self._names, self._skip, self._shared = path, names, skip, shared
        self._values: dict[str, Any] = {}
        self.places: dict[int, str] = {}  # paths of objects, by id
        self._left = NODES
        self._walk(obj, path, DEPTH, set())

    def _walk(self, obj: Any, path: str, depth: int, seen: set[int]) -> None:
        if type(obj) in PLAIN:
            self._values[path] = obj
            return
        if isinstance(obj, VALUES):
            self._values[path] = _Seen(repr(obj)[:60], obj)
            return
        if id(obj) in seen or not depth or not self._left:
            return
        self._left -= 1
        seen.add(id(obj))
        self.places[id(obj)] = path
        if isinstance(obj, torch.Tensor):
            if self._shared or not obj.is_shared():
                self._values[path] = _Seen("a tensor", (tuple(obj.shape), obj.dtype, _of_tensor(obj)))
            return
        if isinstance(obj, np.ndarray):
            self._values[path] = _Seen("an array", (obj.shape, obj.dtype.str, _of_array(obj)))
            return
        raw = _of_ctypes(obj) if self._shared else None
        if raw is not None:
            self._values[path] = _Seen("a value in shared memory", _of_array(raw))
            return
        if isinstance(obj, MANY):
            self._values[path] = _Seen(f"a {type(obj).__name__} of {len(obj)}", _of_many(obj))
            if len(obj) > WIDTH:
                return
        elif isinstance(obj, types.FunctionType):
            self._values[path] = _Seen(obj.__qualname__, obj.__code__, True)
        elif type(obj).__module__ != "builtins":
            self._values[path] = _Seen(f"a {type(obj).__name__}", type(obj), callable(obj))
        for step, inner in _inside(obj):
            if path + step in self._skip or not _is_read(obj, step, self._names):
                continue
            if not isinstance(getattr(type(obj), step[1:], None), functools.cached_property):
                self._walk(inner, path + step, depth - 1, seen)

    def changed(self, obj: Any, added: bool = False) -> list[str]:
        """What is otherwise now: ``["dataset.epoch was 0 and is 1"]``.

        What was None and is an open file, or was made when it was first asked for and has a private name, is none.

        Args:
            obj: the same dataset, later.
            added: whether that counts, too, unless it is an object under a private name.
        """
        return self.changed_since(
            Fingerprint(obj, self._path, self._names, skip=self._skip, shared=self._shared), added
        )

    def changed_since(self, later: Fingerprint, added: bool = False) -> list[str]:
        """What is otherwise in a later look at the same."""
        now, out = later._values, []
        for path, new in now.items():
            made_late = "._" in path and type(new) is _Seen
            if path not in self._values and ((added and not made_late) or self._set(path, new)):
                out.append(f"{path} is {_words(new)}")
        for path, old in self._values.items():
            new = now.get(path, self)
            if new is not self and _differ(old, new) and (added or not _made_late(path, old, new)):
                out.append(f"{path} was {_words(old)} and is {_words(new)}" if _words(old) != _words(new) else path)
        return out

    def _set(self, path: str, new: Any) -> bool:
        """It is an attribute that somebody gave to an object that was there."""
        owner, _, name = path.rpartition(".")
        return (
            type(new) in PLAIN and name.isidentifier() and "._" not in path and type(self._values.get(owner)) is _Seen
        )


class _Seen(NamedTuple):
    """A value that is no number and no word: how it is called, what it is known by, whether it can be called."""

    words: str
    known: Any
    code: bool = False


def _differ(old: Any, new: Any) -> bool:
    if old is None or new is None:
        other = new if old is None else old
        return other is not None and (type(other) is not _Seen or other.code)
    if type(old) is type(new):
        return bool(new != old and new == new)
    return True


def _made_late(path: str, old: Any, new: Any) -> bool:
    return (old is None or new is None) and "._" in path


def _of_tensor(t: torch.Tensor) -> Any:
    plain = type(t) is torch.Tensor and t.device.type == "cpu" and t.layout is torch.strided and not t.is_quantized
    if plain and t.numel() * t.element_size() <= ARRAY_BYTES:
        with torch.no_grad():
            return zlib.crc32(
                t.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8).numpy().data
            )
    return t.data_ptr() if plain else id(t), t._version


def _of_ctypes(x: Any) -> Any:
    """The bytes of ``multiprocessing.Value`` and ``Array``, and of what ctypes makes; None for anything else."""
    ctypes = sys.modules.get("ctypes")
    if ctypes is None:
        return None
    if type(x).__module__ == "multiprocessing.sharedctypes" and hasattr(x, "get_obj"):
        x = x.get_obj()
    kinds = ctypes._SimpleCData, ctypes.Array, ctypes.Structure
    return np.frombuffer(x, np.uint8) if isinstance(x, kinds) and ctypes.sizeof(x) else None


def _of_array(x: Any) -> Any:
    if x.dtype.hasobject:
        return _of_many(x.reshape(-1)[:WHOLE].tolist())
    if x.nbytes <= ARRAY_BYTES:
        return zlib.crc32(x.tobytes())
    return (x.reshape(-1)[:: max(1, x.size // SAMPLES[0])] if x.flags.c_contiguous else x[:1]).tobytes()


def _of_many(x: Any) -> int:
    """The values of a container, where they are plain, or tuples of such."""
    items = x.items() if isinstance(x, dict) else x
    if len(x) > WHOLE:
        few = SAMPLES[0]
        items = x[:: len(x) // few] if isinstance(x, (list, tuple)) else itertools.islice(items, few)
    try:
        found = tuple(items)
        return hash(found) if _plain(found) else 0
    except Exception:  # somebody else's container
        return 0


def _plain(items: tuple[Any, ...]) -> bool:
    """Whether all are plain values, or tuples of such."""
    kinds = set(map(type, items))
    if tuple in kinds:
        inner = itertools.chain.from_iterable(v for v in items if type(v) is tuple)
        kinds = kinds - {tuple} | set(map(type, inner))
    return kinds.issubset(PLAIN)


def _words(value: Any) -> str:
    return value.words if type(value) is _Seen else repr(value)[:60]
