"""What a callable can reach: the values it keeps, the generators it owns, and the sources of chance its code names.

A walk over attributes, items, closures, defaults and the globals that code refers to. Nothing is called. Much of its
length is the tables of what is trusted and what is chance, which are read beside the walk that uses them.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import multiprocessing.sharedctypes
import os
import pickle
import random
import re
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

DEPTH = 8
ENTRIES = ("__call__", "forward", "__getitem__", "__getitems__")  # where a call begins
REPR = 1000  # characters of an object that only says what it is
WIDTH = 1000  # items of one container that are looked at
NODES = 20_000
SAMPLE_BYTES = 1 << 16  # of a large array, what is hashed
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device, np.dtype)
# Packages whose code is trusted to draw from the generators that are watched and from no others.
KNOWN = {"torch", "torchvision", "torchaudio", "numpy", "PIL", "scipy", "skimage", "cv2", "kornia", "monai", "timm"}
KNOWN |= {
    "albumentations",
    "albucore",
    "builtins",
    "operator",
    "_operator",
    "math",
    "functools",
    "itertools",
    "collections",
    "io",
}
KNOWN |= {
    "os",
    "posix",
    "posixpath",
    "pathlib",
    "re",
    "json",
    "csv",
    "stoker",
    "typing",
    "types",
    "enum",
    "abc",
    "copy",
}
KNOWN |= {"dataclasses", "zlib", "struct", "_struct", "warnings", "logging", "pickle", "_pickle", "contextlib", "_io"}
# Chance that leaves no trace in any generator: what code asks them is another each time, and cannot be watched.
UNSEEN = {
    "os.urandom": "os.urandom",
    "posix.urandom": "os.urandom",
    "random.SystemRandom": "random.SystemRandom",
    "datetime.datetime": "the clock",
    "datetime.date": "the clock",
    "os.getpid": "the process' number",
    "posix.getpid": "the process' number",
    "builtins.id": "id()",
    "builtins.input": "input()",
    "numpy.random._generator.default_rng": "a generator made anew (default_rng)",
    "numpy.random.default_rng": "a generator made anew (default_rng)",
}
UNSEEN_MODULES = {"secrets": "secrets", "uuid": "uuid", "socket": "a socket", "_socket": "a socket"}
UNSEEN_MODULES |= {"urllib": "the network", "requests": "the network", "http": "the network"}
UNSEEN_NAMES = {"urandom", "getrandom", "SystemRandom", "token_bytes", "token_hex", "uuid1", "uuid4"}
IMPORT = "import"  # no name of anything: it is a keyword
CV2 = {"randu", "randn", "randShuffle", "theRNG", "kmeans"}  # OpenCV's own generator has no state to look at
# Names under which the watched generators are asked.
CHANCE = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial"}
CHANCE |= {"normal", "poisson", "dropout", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_"}
CHANCE |= {"log_normal_", "geometric_", "feature_dropout", "alpha_dropout", "rrelu", "gumbel_softmax"}
NATIVE = (types.BuiltinFunctionType, types.MethodDescriptorType, np.ufunc, type(np.concatenate))
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)


class Reached(NamedTuple):
    """What a walk found.

    Attributes:
        values: plain values and digests of arrays, by path: the object's state.
        generators: random generators it holds, by path.
        unseen: sources of chance that cannot be watched, in words, each with where.
        chance: functions its own code names that draw from watched generators.
        unknown: things whose state cannot be looked at: iterators, shared values, native code of unknown origin.
        code: a digest of each function, by path.
        roots: packages that the code names.
    """

    values: dict[str, Any]
    generators: dict[str, Any]
    unseen: list[str]
    chance: list[str]
    unknown: list[str]
    code: dict[str, str]
    roots: set[str]


def reach(obj: Any, path: str = "") -> Reached:
    """Everything that ``obj`` can reach, as far as Python code and attributes tell."""
    walk = _Walk()
    walk.visit(obj, path or name_of(obj), DEPTH, own=True)
    return walk.out


def name_of(obj: Any) -> str:
    """What people call a transform: its class, or a function's name."""
    if isinstance(obj, functools.partial):
        return f"partial({name_of(obj.func)})"
    name = getattr(obj, "__name__", None) if callable(obj) and not isinstance(obj, torch.nn.Module) else None
    return str(name or type(obj).__name__)


def state_of(generator: Any) -> Any:
    """A generator's state, comparable."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return pickle.dumps(_numpy_state(generator))


def set_state(generator: Any, state: Any) -> None:
    """Sets a generator back to what ``state_of`` said of it, in this process."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(pickle.loads(state))
    else:
        getattr(generator, "bit_generator", generator).state = pickle.loads(state)


def _numpy_state(generator: Any) -> Any:
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


class _Walk:
    def __init__(self) -> None:
        self.out = Reached({}, {}, [], [], [], {}, set())
        self._seen: dict[int, Any] = {}

    @staticmethod
    def _note(table: dict[str, Any], path: str, value: Any) -> None:
        """Under a path of its own: an instance's attribute, its class' of the same name and a base class' are three."""
        while path in table and table[path] is not value and table[path] != value:
            path += "'"
        table[path] = value

    def visit(self, x: Any, path: str, depth: int, own: bool = False) -> None:
        if isinstance(x, PLAIN):
            self._note(self.out.values, path, x)
            return
        if id(x) in self._seen:
            return
        if isinstance(x, NATIVE):
            self._native(x, path)
            return
        if not depth or len(self._seen) > NODES:
            self.out.unknown.append(f"{path} is too deep to look at")
            return
        self._seen[id(x)] = x
        if isinstance(x, GENERATORS):
            if isinstance(x, random.SystemRandom):
                self.out.unseen.append(f"{path} is random.SystemRandom")
            else:
                self._note(self.out.generators, path, x)
        elif isinstance(x, (torch.Tensor, np.ndarray)):
            self._note(self.out.values, path, digest(x))
        elif isinstance(x, types.ModuleType) or x is os.environ:  # which of them are asked for nobody knows
            pass
        elif isinstance(x, enum.Enum):
            self._note(self.out.values, path, str(x))
        elif isinstance(x, (os.PathLike, re.Pattern)):  # not what they remember of themselves
            self._note(self.out.values, path, os.fspath(x) if isinstance(x, os.PathLike) else (x.pattern, x.flags))
        elif isinstance(x, (types.FunctionType, types.MethodType, functools.partial)):
            self._function(x, path, depth, own)
        elif isinstance(x, (staticmethod, classmethod)):
            self.visit(x.__func__, path, depth - 1, own)
        elif isinstance(x, property):
            self.visit(x.fget, path, depth - 1, own)
        elif isinstance(x, type):
            self._class(x, path, depth, own)
        elif isinstance(x, (list, tuple, set, frozenset, dict)):
            self._container(x, path, depth)
        else:
            self._instance(x, path, depth, own)

    def _container(self, x: Any, path: str, depth: int) -> None:
        self._note(self.out.values, f"len({path})", len(x))
        if isinstance(x, dict):
            for k, v in list(x.items())[:WIDTH]:
                self.visit(v, f"{path}[{k!r}]", depth - 1)
        elif isinstance(x, (set, frozenset)):
            self._note(self.out.values, path, sorted(map(repr, list(x)[:WIDTH])))
        else:
            for i, v in enumerate(x[:WIDTH]):
                self.visit(v, f"{path}[{i}]", depth - 1)

    def _instance(self, x: Any, path: str, depth: int, own: bool) -> None:
        if isinstance(x, multiprocessing.sharedctypes.SynchronizedBase) or type(x).__module__ in ("_ctypes", "ctypes"):
            self.out.unknown.append(f"{path} is shared with other processes")
            return
        if hasattr(type(x), "__next__"):
            self.out.unknown.append(f"{path} is an iterator")
            return
        root = type(x).__module__.split(".")[0]
        self.out.roots.add(root)
        held = _held(x)
        if not held and root not in KNOWN and callable(x) and not _python(type(x)):
            self.out.unknown.append(f"{path} is native code of {type(x).__module__}")
        if not held and root in sys.stdlib_module_names:  # a date, a fraction
            words = repr(x)
            if " at 0x" not in words:
                self._note(self.out.values, path, words[:REPR])
        for k, v in held.items():
            self.visit(v, f"{path}.{k}", depth - 1)
        self._class(type(x), path, depth, own)

    def _class(self, cls: type, path: str, depth: int, own: bool) -> None:
        """Class attributes are state, too; and what the methods name that a call goes through."""
        outside = KNOWN - {"torchvision", "monai", "albumentations", "albucore", "kornia", "timm"}
        bases = [base for base in cls.__mro__ if base.__module__.split(".")[0] not in outside]
        called = _called(bases)
        for base in bases:
            mine = base is cls and own
            for k, v in list(vars(base).items()):
                if isinstance(v, (types.FunctionType, staticmethod, classmethod, property)):
                    if k in called:
                        self.visit(v, f"{path}.{k}", depth - 1, mine)
                elif not callable(v) and not k.startswith("__"):
                    self.visit(v, f"{path}.{k}", depth - 1)

    def _native(self, x: Any, path: str) -> None:
        owner = getattr(x, "__self__", None)
        named = getattr(owner, "__module__" if isinstance(owner, type) else "__name__", None)
        module = str(getattr(x, "__module__", None) or named or "builtins")
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            self.visit(owner, path, 2)
            return
        if module.split(".")[0] not in KNOWN and module.split(".")[0] not in sys.stdlib_module_names:
            self.out.unknown.append(f"{path} is native code of {module}")

    def _function(self, x: Any, path: str, depth: int, own: bool) -> None:
        if isinstance(x, functools.partial):
            for k, v in (("func", x.func), ("args", x.args), ("keywords", x.keywords)):
                self.visit(v, path if k == "func" else f"{path}.{k}", depth - 1, own and k == "func")
            return
        if isinstance(x, types.MethodType):
            self.visit(x.__self__, f"{path}.__self__", depth - 1, own)
            self.visit(x.__func__, path, depth - 1, own)
            return
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            if not isinstance(value, type):  # __class__, for super()
                self.visit(value, f"{path}:{name}", depth - 1, own)
        for i, v in enumerate((*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())):
            self.visit(v, f"{path}:default{i}", depth - 1)
        self._note(self.out.code, path, _digest(x.__code__))
        for code in _codes(x.__code__):
            self._code(code, x.__globals__, path, depth, own)

    def _code(self, code: types.CodeType, scope: dict[str, Any], path: str, depth: int, own: bool) -> None:
        for dotted, stored in _names(code):
            first, *rest = dotted
            if stored:
                self.out.unknown.append(f"{path} writes to the global {first}")
                continue
            if first == IMPORT:  # inside the function
                root = rest[0].split(".")[0]
                self.out.roots.add(root)
                if root in UNSEEN_MODULES or root in ("time", "datetime"):
                    self.out.unseen.append(f"{path} imports {root}")
                continue
            if not first:  # attributes of something that is not known here
                if own and set(rest) & CHANCE:
                    self.out.chance.append(".".join(rest))
                if set(rest) & UNSEEN_NAMES:
                    self.out.unseen.append(f"{path} asks {'.'.join(rest)}")
                continue
            value: Any = scope.get(first, getattr(sys.modules["builtins"], first, None))
            words = first
            for attribute in rest:
                if not isinstance(value, (types.ModuleType, type)):
                    break
                value, words = getattr(value, attribute, None), f"{words}.{attribute}"
                if isinstance(value, types.ModuleType):
                    continue
            self._named(value, words, path, depth, own)

    def _named(self, value: Any, words: str, path: str, depth: int, own: bool) -> None:
        if value is None:
            return
        module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if module is None:
            owner = getattr(value, "__self__", None)
            module = getattr(type(owner) if owner is not None else value, "__module__", "") or ""
        module = str(module)
        root, name = module.split(".")[0], str(getattr(value, "__name__", ""))
        self.out.roots.add(root)
        bound = getattr(value, "__self__", None)
        of = f"{bound.__module__}.{bound.__name__}" if isinstance(bound, type) else f"{module}.{name}"
        unseen = UNSEEN.get(of) or UNSEEN_MODULES.get(root)
        if root == "time" and name not in ("time" if isinstance(value, types.ModuleType) else "", "sleep"):
            unseen = "the clock"
        if unseen:
            self.out.unseen.append(f"{path} asks {unseen}")
            return
        if root == "cv2" and name in CV2:
            self.out.unseen.append(f"{path} draws from OpenCV's generator (cv2.{name})")
            return
        if (
            root == "random"
            or module.startswith("numpy.random")
            or isinstance(bound, (random.Random, np.random.RandomState))
        ):
            if own and not isinstance(value, (types.ModuleType, type)):
                self.out.chance.append(words)
            if isinstance(value, GENERATORS):
                self.visit(value, words, depth - 1)
            return
        if root == "torch" and name in CHANCE:
            if own:
                self.out.chance.append(words)
            return
        if isinstance(value, types.ModuleType):
            return
        known = root in KNOWN or root in sys.stdlib_module_names
        if known and isinstance(value, (types.FunctionType, type, *NATIVE)):
            return
        self.visit(value, words, depth - 1, own and root not in KNOWN)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[tuple[str, ...], bool], ...]:
    """The dotted names that code loads, and the globals that it writes."""
    out: list[tuple[tuple[str, ...], bool]] = []
    current: list[str] | None = None
    first = code.co_varnames[0] if code.co_argcount else None
    for op in dis.get_instructions(code):
        if current == ["id"] and op.opname.startswith("LOAD_FAST") and op.argval == first == "self":
            current = None  # id(self) is the same in every call, and many transforms keep their books by it
        elif op.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if current:
                out.append((tuple(current), False))
            current = [str(op.argval)]
        elif op.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            current = [*(current or [""]), str(op.argval)]
        elif op.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            out.append(((str(op.argval),), True))
        elif op.opname == "IMPORT_NAME":
            out.append(((IMPORT, str(op.argval)), False))
            current = None
        elif op.opname not in ("PRECALL", "CACHE", "PUSH_NULL", "NOP", "RESUME", "EXTENDED_ARG"):
            if current:
                out.append((tuple(current), False))
            current = None
    if current:
        out.append((tuple(current), False))
    return tuple(dict.fromkeys(out))


def _called(bases: list[type]) -> set[str]:
    """Methods that a call, or a look at an item, may come to: by the names in the code of those before."""
    methods: dict[str, list[types.FunctionType]] = {}
    for base in bases:
        for k, v in vars(base).items():
            f = v.fget if isinstance(v, property) else getattr(v, "__func__", v)
            if isinstance(f, types.FunctionType):
                methods.setdefault(k, []).append(f)
    found, todo = set(), [k for k in ENTRIES if k in methods]
    while todo:
        k = todo.pop()
        if k not in found:
            found.add(k)
            names = {n for f in methods[k] for code in _codes(f.__code__) for n in code.co_names}
            todo += [n for n in (methods if "getattr" in names else names) if n in methods]
    return found


@functools.lru_cache(maxsize=4096)
def _digest(code: types.CodeType) -> str:
    """Of what runs, without where it is written."""
    h = hashlib.sha256()
    for c in _codes(code):
        plain = [
            sorted(map(repr, v)) if isinstance(v, frozenset) else v
            for v in c.co_consts
            if not isinstance(v, types.CodeType)
        ]
        h.update(repr((c.co_code, c.co_names, c.co_varnames, plain)).encode())
    return h.hexdigest()[:16]


def _held(x: Any) -> dict[str, Any]:
    held = dict(getattr(x, "__dict__", {}))
    for base in type(x).__mro__:
        slots = vars(base).get("__slots__", ())
        for k in (slots,) if isinstance(slots, str) else slots:
            if hasattr(x, k):
                held[k] = getattr(x, k)
    return held


def _python(cls: type) -> bool:
    return isinstance(cls.__call__, types.FunctionType)


def digest(x: Any) -> tuple[Any, ...]:
    """What an array or tensor looks like; of a large one a part."""
    if isinstance(x, torch.Tensor):
        look: tuple[Any, ...] = (str(x.dtype), tuple(x.shape), str(x.device))
        if not x.is_cpu or x.layout is not torch.strided or x.is_quantized:
            return (*look, x._version)
        flat = x.detach().reshape(-1)
        step = max(1, flat.numel() * x.element_size() // SAMPLE_BYTES)
        data = flat[::step].contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    else:
        look = (x.dtype.str, x.shape)
        if x.dtype.hasobject:
            return look
        step = max(1, x.nbytes // SAMPLE_BYTES)
        data = np.ascontiguousarray(x.reshape(-1)[::step]).tobytes() if x.size else b""
    return (*look, hashlib.blake2b(data, digest_size=8).hexdigest())
