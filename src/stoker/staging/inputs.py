"""``Inputs``: everything that making a sample may read, with a complete digest of each part.

A cached sample may be served only if nothing that it was made from has changed. ``Inputs`` walks from the dataset to
its attributes, items, classes, functions and modules, and digests every byte. If an object has no complete digest,
``opaque`` names it, and nothing that depends on it may be cached.

::

    dataset ── attributes and slots ── values: plain ones, arrays, tensors, tables, containers
       └ class ── methods, class attributes ── code, defaults, closures ── globals that the code names ── modules
                                                                      └ modules that it imports, os.environ

Only user code is entered; library functions and classes are identified by name. Two ``Inputs`` of the same object can
be compared if they were made in the same process or a fork of it. ``keys`` can be compared across all processes. See
docs/concepts/exact.md.
"""

from __future__ import annotations

import abc
import builtins
import functools
import hashlib
import inspect
import os
import pickle
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from ..core.marked_code import original
from ..core.object_tree import PLAIN, VALUES, is_filesystem
from .callee import key_of
from .library_objects import (
    BOUND,
    CONTAINERS,
    GENERATORS,
    NATIVE_CODE,
    Held,
    attributes_of,
    classes_of_samples,
    files_in_memory,
    hooks_of_all_modules,
    items_of,
    levels_of_loggers,
    library_settings,
    native_base,
    options_of,
    stamp_of_descriptor,
    token_of_plain,
    working_folder,
)
from .source_files import texts_in
from .users_code import (
    address_of_class,
    attributes_read,
    constants_in,
    file_of_module,
    is_library_class,
    is_users_code,
    is_users_module,
    module_name,
    names_in,
    qualified_name,
    runs_library_code,
    token_of_code,
    uses_hashes,
)
from .value_digests import DATASET, IMPORTED, Entry, ValueDigests, lies_in, readable

TEXTS = frozenset({"str", "PosixPath", "PurePosixPath"})
OF_WRAPPERS = frozenset({"func", "__func__", "__self__", "__wrapped__"})
MOST_DESCRIPTORS = 1 << 16
WIDTH = 200  # items of a container that get entries of their own, unless they are plain
DEPTH = 40  # nesting depth of objects
SKIPPED_MEMBERS = frozenset(
    {"__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__init__", "__qualname__", "__slots__"}
    | {"__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl", "__parameters__"}
    | {"__annotate__", "__annotate_func__", "__annotations_cache__", "__classdictcell__", "__orig_bases__"}
    | {"__dataclass_fields__", "__slotnames__"}
)
GLOBALS = "dataset[1]['"  # how the paths of global variables, and of members of classes, begin
MODULE_NAMES = frozenset({"__builtins__", "__loader__", "__spec__", "__cached__", "__file__"})
ENVIRONMENT = frozenset({"environ", "getenv", "environb", "expandvars", "expanduser"})
BY_NAME = frozenset({"getattr", "vars", "__dict__"})
LOGGERS = frozenset({"logging", "getLogger", "isEnabledFor", "getEffectiveLevel", "hasHandlers"})
GRADIENTS = frozenset({"is_grad_enabled", "requires_grad", "requires_grad_", "backward", "autograd"})
READ_ENVIRONMENT = {  # by id: what reads the environment under whatever name
    id(getattr(module, name))
    for module, names in ((os, ("environ", "environb", "getenv")), (os.path, ("expandvars", "expanduser")))
    for name in names
    if hasattr(module, name)
}
CALLERS = frozenset({"_getframe", "currentframe", "_current_frames", "walk_stack", "get_objects", "get_referrers"})
DESCRIPTORS = {("os", name) for name in ("read", "pread", "preadv", "readv", "fdopen", "fstat", "lseek")}
CODE = (types.FunctionType, type)
SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
METHODS = (types.MethodType, staticmethod, classmethod, property)
FUNCTIONS = (*METHODS, *BOUND, functools.partial, functools._lru_cache_wrapper)
WRAPPERS = (*CODE, *FUNCTIONS, types.ModuleType, weakref.ref)


class _NotPlain(Exception):
    """A container holds objects that are not plain values."""


class _Sink:
    """A file that hashes what is written to it, unless told otherwise."""

    def __init__(self, hashes: bool = True) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self.nbytes = 0
        self._hashes = hashes

    def write(self, data: bytes) -> None:
        if self._hashes:
            self.hash.update(data)
            self.nbytes += len(data)


class Head(NamedTuple):
    """The first part of a function, which alone counts."""

    code: types.CodeType
    token: object  # identifies it


class Inputs(ValueDigests):
    """What making a sample may currently read."""

    def __init__(
        self,
        dataset: object,
        functions: Collection[object] = (),
        *,
        names: set[str] | None = None,
        skip: Collection[str] = (),
        held: dict[str, object] | None = None,
        shared: bool = True,
        ignored: Collection[str] = (),
        across_runs: bool = False,
        digests: bool = True,
        heads: dict[int, Head] | None = None,
    ) -> None:
        """``functions``: further user functions that run; ``names``: attributes that code may read, None for any;
        ``skip``: paths to ignore, with everything below them; ``held``: further values, by name; ``shared``: whether
        memory that processes share counts; ``ignored``: names of attributes and globals to ignore; ``across_runs``:
        prepare for ``keys``, which takes longer; ``digests``: whether values are digested, or only looked through;
        ``heads``: by id of a function of which only a part counts, that part."""
        super().__init__(shared, across_runs, digests)
        self.functions: dict[int, types.FunctionType] = {}  # the user's functions that may run, by id
        self.called_as: dict[int, set[str]] = {}  # by id of a function: attributes that hold it, or its object
        self._kind = type(dataset)
        self._names = names
        self._heads = heads or {}
        self._skip = skip
        self._ignored = ignored
        self.left_out: set[str] = set()  # attributes that were found and ignored
        self._of_code: set[str] = set()  # paths of functions
        self.caches: list[functools._lru_cache_wrapper[object]] = []  # functions that cache their results
        self.packages: set[str] = set()  # libraries whose functions and classes may be used
        self._beside_descriptors: set[str] = set()  # names in code that reads by descriptor: ``os.pread(self.fd, 8)``
        self._variables: set[str] = set()  # of the environment, which code names
        self._modules: dict[int, set[str]] = {}  # by id of a user's module: names that were looked up in it
        self._classes: set[int] = set()  # ids of classes whose members have been visited
        self._known: dict[type, bool] = {}  # whether a class is the user's
        self._found_at: dict[str, int] = {}  # ids of global variables and members of classes, by path
        self._mentioned: set[str] = set()  # names in the user's code
        self.depends_on_hashes = False  # calls hash(), or may iterate over a set of strings
        self._visit(dataset, DATASET, DEPTH)
        for k, fn in enumerate(functions):
            self._visit(fn, f"dataset[{k + 1}]", DEPTH)
        self.add(held or {})
        self._note_process()

    def _note_process(self) -> None:
        """Adds what belongs to the process rather than to an object."""
        self._note_replaced_methods()
        self.add(files_in_memory())
        if any(isinstance(x, torch.nn.Module) for _, x, _ in self._seen.values()):
            self.add(hooks_of_all_modules())
        if self._depends_on_gradients:
            asked = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self.entries["whether gradients are enabled"] = Entry("asked", asked)
        if self._beside_descriptors:
            self._note_descriptors()
        self.entries["settings of libraries"] = Entry("settings", library_settings())
        for package, options in options_of(self.packages).items():
            self.entries[f"options of {package}"] = Entry("options", options)
        if not self._across_runs:  # then the stamps of files tell
            self.entries["the working folder"] = Entry(working_folder(), working_folder())

    def _note_replaced_methods(self) -> None:
        """Adds methods that the script has put into a library's class: ``torch.Tensor.cumsum = my_cumsum``. Of classes
        whose objects samples are made from, and of objects among the inputs, those that the code names."""
        found = {type(x): None for _, x, _ in list(self._seen.values()) if not isinstance(x, WRAPPERS)}
        for cls in (*classes_of_samples(), *found):
            names = self._mentioned | ({"forward"} if issubclass(cls, torch.nn.Module) else set())
            for base in cls.__mro__ if is_library_class(cls) else ():
                for name in sorted(names & vars(base).keys()):
                    value = vars(base)[name]
                    if isinstance(value, types.FunctionType) and is_users_code(value.__code__):
                        self._visit(value, f"dataset[1]['{qualified_name(base)}.{name}']", DEPTH)
                names -= vars(base).keys()

    def add(self, held: dict[str, Held]) -> None:
        """Adds values, by name."""
        for name, value in held.items():
            self._visit(value, f"dataset[1][{name!r}]", DEPTH)

    @property
    def texts(self) -> list[str]:
        """Strings among the values: some may name files."""
        found = (entry.digest for entry in self.entries.values())
        pairs = (d for d in found if isinstance(d, tuple) and len(d) == 2)
        plain = [text for kind, text in pairs if kind in TEXTS and isinstance(text, str)]
        of_containers = texts_in([x for _, x, _ in self._seen.values() if type(x) in CONTAINERS])
        return [*plain, *of_containers, *(os.environ[name] for name in sorted(self._variables) if name in os.environ)]

    @property
    def numbers(self) -> set[int]:
        """Small integers among the values: some may be descriptors of files."""
        found = (entry.digest for entry in self.entries.values())
        plain = {d[1] for d in found if isinstance(d, tuple) and len(d) == 2 and d[0] == "int"}
        held: list[Held] = [x for _, x, _ in self._seen.values() if type(x) in CONTAINERS]
        inside = (y for x in held if len(x) <= WIDTH for y in (x.values() if isinstance(x, dict) else x))
        return {n for n in (*plain, *inside) if type(n) is int and 2 < n < MOST_DESCRIPTORS}

    @property
    def objects(self) -> Collection[int]:
        """Ids of all objects that have parts."""
        return self._seen.keys()

    @property
    def of_libraries(self) -> list[object]:
        """Objects whose attributes the code of libraries may set."""
        return [x for _, x, _ in self._seen.values() if not isinstance(x, type) and runs_library_code(type(x))]

    def codes(self) -> Iterator[types.CodeType]:
        """Yields the code of the functions that may run."""
        for key, fn in self.functions.items():
            yield self._heads[key].code if key in self._heads else original(fn.__code__)

    def found(self, key: str) -> list[tuple[str, object]]:
        """The objects with this ``key_of``, each with its path."""
        callables = ((path, x) for _, x, path in self._seen.values() if callable(x) and not isinstance(x, type))
        return [(path, x) for path, x in callables if key_of(x) == key]

    def keys(self, opened: Collection[str] = ()) -> tuple[str, str]:
        """Digests of the data and of the code, without anything below the paths in ``opened``."""
        held, code = _Sink(), _Sink()
        for path, entry in sorted(self.entries.items()):
            if not lies_in(path, opened):
                (code if path in self._of_code else held).write(repr((path, entry.digest)).encode())
        return held.hash.hexdigest(), code.hash.hexdigest()

    # -- the tree of paths

    def _visit(self, x: Held, path: str, depth: int) -> None:
        if path in self._skip:
            return
        if path in self.entries:
            if self._found_at.get(path, id(x)) != id(x):  # of another module, or class, of the same name
                self._visit(x, f"{path}'", depth)
            return
        if path.startswith(GLOBALS):
            self._found_at[path] = id(x)
        self._note_package(x)
        self._note_name(x, path)
        if id(x) in READ_ENVIRONMENT:
            self._note_environment()
        found = self._leaf(x, path)
        if found is not None:
            self.entries[path] = found
            if type(x) not in PLAIN:
                self._visit_own(x, path, depth - 1)
            return
        if id(x) in self._seen:
            place = self._seen[id(x)][2]
            is_code = isinstance(x, CODE)
            if isinstance(x, types.FunctionType):
                self._of_code.add(path)
            self.entries[path] = Entry(x.__qualname__, self._named(x)) if is_code else Entry("an object", place)
            if isinstance(x, type):
                self._visit_constructor(x, depth - 1)
            return
        self._seen[id(x)] = len(self._seen), x, path
        if depth == 0:
            self._add_opaque(path, x, "is nested too deeply")
            return
        try:
            self._visit_inside(x, path, depth - 1)
        except RecursionError:
            self._add_opaque(path, x, "is nested too deeply")
        except Exception as e:  # a user-defined class whose code fails
            self._add_opaque(path, x, f"fails: {type(e).__name__}")

    def _named(self, x: Held) -> object:
        """Identity of a function or class whose parts have entries already."""
        if isinstance(x, types.FunctionType):
            return self._heads[id(x)].token if id(x) in self._heads else token_of_code(x.__code__)
        return self._identity(x)

    def _identity(self, cls: type) -> str:
        """Tells a class of the user's from another of the same name, as ``isinstance`` does. Between runs: its name."""
        name = qualified_name(cls)
        return name if self._across_runs or is_library_class(cls) else f"{name} {address_of_class(cls)}"

    def _note_name(self, x: Held, path: str) -> None:
        """Notes under which attribute a function, or an object that can be called, is found."""
        fn = x if isinstance(x, types.FunctionType) else inspect.getattr_static(type(x), "__call__", None)
        if isinstance(fn, types.FunctionType):
            names = [name for name in re.findall(r"\.([A-Za-z_]\w*)", path) if name not in OF_WRAPPERS]
            self.called_as.setdefault(id(fn), set()).update(names[-1:])

    def _is_users(self, cls: type) -> bool:
        if cls not in self._known:
            self._known[cls] = not is_library_class(cls)
        return self._known[cls]

    def _visit_own(self, x: Held, path: str, depth: int) -> None:
        """Visits what is beside the state of a library's object: what a user's subclass adds, and attributes that the
        script has set (``frame.scale = 2``)."""
        if depth <= 0:
            return
        is_users = self._is_users(type(x))
        if is_users:
            self._visit_class(type(x), path, depth)
        for name, value in attributes_of(x):
            is_plain = type(value) in PLAIN and not isinstance(x, GENERATORS)  # ``random.gauss`` sets an attribute
            is_set = not name.startswith("_") and (is_plain if self._names is None else name in self._names)
            if self._is_read_of(x, name) if is_users else is_set:
                self._visit(value, f"{path}.{name}", depth)

    def _note_descriptors(self) -> None:
        """Adds the files whose descriptor an attribute may be."""
        for path, entry in list(self.entries.items()):
            kind, number = entry.digest if isinstance(entry.digest, tuple) and len(entry.digest) == 2 else ("", 0)
            may_be = kind == "int" and path.rpartition(".")[2].rstrip("']") in self._beside_descriptors
            stamp = stamp_of_descriptor(number) if may_be and isinstance(number, int) else ()
            if stamp:
                self.entries[f"{path} as a file"] = Entry("a file", stamp)
            elif stamp is None:
                self.opaque[path] = f"{readable(path)} is the descriptor of a file without a name"

    def _note_package(self, x: Held) -> None:
        owner = x if isinstance(x, (*CODE, *NATIVE_CODE)) else type(x)
        module = x.__name__ if isinstance(x, types.ModuleType) else getattr(owner, "__module__", None)
        if isinstance(module, str):
            self.packages.add(module.partition(".")[0])

    def _visit_inside(self, x: Held, path: str, depth: int) -> None:
        if isinstance(x, (*FUNCTIONS, types.ModuleType, functools.cached_property)):
            self._visit_own(x, path, depth)
        if isinstance(x, types.FunctionType):
            self._visit_function(x, path, depth)
        elif isinstance(x, type):
            self._visit_class(x, path, depth)
            self._visit_constructor(x, depth)
        elif isinstance(x, types.ModuleType):
            self.entries[path] = Entry(f"module {x.__name__}", x.__name__)
            names = vars(x).keys() - MODULE_NAMES if self._names is None else self._names
            self._visit_module(x, frozenset(names), depth)  # of which code may read any name
        elif type(x) in CONTAINERS:
            self._visit_container(x, path, depth)
        elif isinstance(x, BOUND):
            self.entries[path] = Entry(x.__qualname__, (type(x).__name__, x.__qualname__))
            self._visit(x.__self__, f"{path}.__self__", depth)
        elif isinstance(x, types.MethodType):
            self._visit(x.__func__, f"{path}.__func__", depth)
            self._visit(x.__self__, f"{path}.__self__", depth)
        elif isinstance(x, functools.partial):
            for name, value in (("func", x.func), ("args", x.args), ("keywords", x.keywords), *vars(x).items()):
                self._visit(value, f"{path}.{name}", depth)
        elif isinstance(x, (staticmethod, classmethod)):
            self._visit(x.__func__, path, depth)
        elif isinstance(x, property):
            for name in ("fget", "fset", "fdel"):
                self._visit(getattr(x, name), f"{path}.{name}", depth)
        elif isinstance(x, functools.cached_property):
            self._visit(x.func, f"{path}.func", depth)
        elif isinstance(x, functools._lru_cache_wrapper):
            self.caches.append(x)
            self._visit(x.__wrapped__, f"{path}.__wrapped__", depth)
        elif isinstance(x, weakref.ref):
            self._visit(x(), f"{path}()", depth)
        else:
            self._visit_instance(x, path, depth)

    def _visit_container(self, x: Held, path: str, depth: int) -> None:
        text = f"a {type(x).__name__} of {len(x)}"
        if isinstance(x, deque):
            self.entries[path] = Entry(text, x.maxlen)
            self._visit_container(list(x), f"{path}[:]", depth)
            return
        try:
            self.entries[path] = Entry(text, self._flat(x, plain=True))
            return
        except _NotPlain:
            pass
        except (ValueError, RecursionError):  # it contains itself
            self._add_opaque(path, x, "holds itself")
            return
        if len(x) > WIDTH or isinstance(x, (set, frozenset)):
            self.entries[path] = Entry(text, self._flat(x, plain=False, path=path))
            return
        items = x.items() if isinstance(x, dict) else enumerate(x)
        keys = list(x) if isinstance(x, dict) else len(x)
        self.entries[path] = Entry(text, (type(x).__name__, self._flat(keys, plain=False, path=path)))
        for k, v in items:
            self._visit(v, f"{path}[{k!r}]", depth)

    def _visit_instance(self, x: Held, path: str, depth: int) -> None:
        own = getattr(type(x), "_stoker_children", None)
        if own is not None:
            for step, value in x._stoker_children():
                self._visit(value, path + step, depth)
            return
        cls = type(x)
        self.entries[path] = Entry(f"a {cls.__name__}", self._identity(cls))
        if is_filesystem(x) and "memory" in str(getattr(cls, "protocol", "")):
            self._add_opaque(path, x)
            return
        if is_filesystem(x):
            for name in ("storage_args", "storage_options"):
                self._visit(getattr(x, name, None), f"{path}.{name}", depth)
            return
        if not is_library_class(cls):
            self._visit_class(cls, path, depth)
        for name, value in attributes_of(x):
            if self._is_read_of(x, name):
                self._visit(value, f"{path}.{name}", depth)
        native = native_base(cls)
        if isinstance(x, VALUES):
            self.entries[path] = Entry(_repr_of_library(x)[:60], (qualified_name(cls), _repr_of_library(x)))
        elif native is object:
            return
        elif native in CONTAINERS:
            self._visit_container(items_of(x, native), f"{path}[:]", depth)
        elif issubclass(native, (*PLAIN[:-1], bytearray)):
            self.entries[f"{path}[:]"] = Entry("a value", token_of_plain(native(x)))
        else:
            found, is_complete = self._native_state(x)
            if is_complete:
                self._visit(found, f"{path}.__reduce__", depth)
            else:
                self._add_opaque(path, x)

    def _visit_function(self, fn: types.FunctionType, path: str, depth: int) -> None:
        head = self._heads.get(id(fn))
        code = fn.__code__ if head is None else head.code
        if not is_users_code(code):
            self.entries[path] = Entry(fn.__qualname__, qualified_name(fn))
            self._visit_closure(fn, path, depth)  # for a decorator: ``torch.no_grad()``, ``functools.singledispatch``
            return
        self.functions[id(fn)] = fn
        self._of_code.add(path)
        self.entries[path] = Entry(fn.__qualname__, self._named(fn))
        for k, value in enumerate(fn.__defaults__ or ()):
            self._visit(value, f"{path}.__defaults__[{k}]", depth)
        for name, value in (fn.__kwdefaults__ or {}).items():
            self._visit(value, f"{path}.{name}", depth)
        self._visit_closure(fn, path, depth)
        self._visit_scope(code, fn.__globals__, depth)

    def _visit_closure(self, fn: types.FunctionType, path: str, depth: int) -> None:
        """Visits a function's closure variables and attributes."""
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            try:
                self._visit(cell.cell_contents, f"{path}.{name}", depth)
            except ValueError:
                self.entries[f"{path}.{name}"] = Entry("not set", None)
        for name, value in fn.__dict__.items():
            self._visit(value, f"{path}.{name}", depth)

    def _visit_scope(self, code: types.CodeType, scope: dict[str, Held], depth: int) -> None:
        """Visits what code reads from its module, from other modules, and from the environment."""
        read, mentioned, imported = names_in(original(code))
        self._mentioned |= mentioned
        module = module_name(str(scope.get("__name__", "")))
        if "globals" in read or "__globals__" in mentioned:
            read = read | (mentioned & scope.keys()) if mentioned & scope.keys() - read else frozenset(scope)
        for name in sorted(read):
            path = f"dataset[1]['{module}.{name}']"
            value = scope.get(name, vars(builtins).get(name, scope))
            if value is not scope and name not in self._ignored:
                self._visit_global(value, path, mentioned, depth)
        self.depends_on_hashes |= uses_hashes(original(code))
        attributes = attributes_read(original(code))
        self._depends_on_gradients |= not mentioned.isdisjoint(GRADIENTS)
        if not DESCRIPTORS.isdisjoint(attributes):
            self._beside_descriptors |= mentioned
        if not mentioned.isdisjoint(BY_NAME):  # ``getattr(torch, "level", 0)``
            owners = {(name,) for name in read} | attributes
            attributes = attributes | {(*owner, text) for owner in owners for text in constants_in(original(code))}
        for names in sorted(attributes):
            self._visit_value_of_library(names, scope, depth)
        if mentioned & ENVIRONMENT:
            self._variables |= mentioned & os.environ.keys()
            self._note_environment()
        if mentioned & LOGGERS:
            self.entries["levels of loggers"] = Entry("levels", levels_of_loggers())
        if mentioned & CALLERS:
            self._add_opaque(f"dataset[1]['{module}.{code.co_name}']()", code, "reads the variables of its callers")
        if mentioned & {"getrecursionlimit", "RecursionError"}:
            self.entries["recursion limit"] = Entry("limit", sys.getrecursionlimit())
        for name in sorted(imported):
            self._visit_import(_absolute(name, scope), mentioned, depth)

    def _note_environment(self) -> None:
        if "os.environ" not in self.entries:
            self.entries["os.environ"] = Entry("the environment", self._flat(dict(os.environ), plain=True))

    def _visit_global(self, value: Held, path: str, mentioned: frozenset[str], depth: int) -> None:
        if isinstance(value, types.ModuleType):
            self._visit_module(value, mentioned, depth)
        else:
            self._visit(value, path, depth)

    def _visit_module(self, module: types.ModuleType, mentioned: frozenset[str], depth: int) -> None:
        self._note_package(module)
        if not is_users_module(module) or depth <= 0:
            return
        scope = vars(module)
        wanted = set(mentioned & scope.keys())
        if not mentioned.isdisjoint(BY_NAME):
            wanted = set(scope) - MODULE_NAMES
        wanted |= {"__getattr__"} & scope.keys()
        done = self._modules.setdefault(id(module), set())
        for name in sorted(wanted - done):
            done.add(name)
            self._visit_global(
                scope[name], f"dataset[1]['{module_name(module.__name__)}.{name}']", mentioned, depth - 1
            )
        for name in sorted(mentioned - scope.keys()):
            self._visit_import(f"{module.__name__}.{name}", mentioned, depth - 1, only_loaded=True)

    def _visit_value_of_library(self, names: tuple[str, ...], scope: dict[str, Held], depth: int) -> None:
        """Visits library values such as ``sys.argv``, and functions that the script has put into a library."""
        found = scope.get(names[0])
        for name in names[1:]:
            is_module = isinstance(found, types.ModuleType) and not is_users_module(found)
            if not is_module and not (isinstance(found, type) and is_library_class(found)):
                return
            path, found = f"dataset[1]['{found.__name__}.{name}']", vars(found).get(name)  # type: ignore[union-attr]
        if isinstance(found, types.FunctionType):
            is_users = is_users_code(found.__code__)
        else:
            is_users = not is_library_class(found if isinstance(found, type) else type(found))
        if is_users or type(found) in (*PLAIN, *CONTAINERS, functools.partial, types.MethodType):
            self._visit(found, path, depth)
        elif callable(found) and (given := _named_otherwise(found, path)):
            self.entries[path] = Entry(given, given)

    def _visit_import(self, name: str, mentioned: frozenset[str], depth: int, only_loaded: bool = False) -> None:
        module = sys.modules.get(name)
        path = f"dataset[1]['{name}']"
        if module is not None:
            if not only_loaded and is_users_module(module):
                self.entries[path] = Entry(f"module {name}", IMPORTED)
            parts = name.split(".")
            for k in range(1, len(parts) + 1):
                found = sys.modules.get(".".join(parts[:k]))
                if found is not None:
                    self._visit_module(found, mentioned, depth)
            return
        if only_loaded:
            return
        self.entries[path] = Entry(f"module {name}, not imported yet", file_of_module(name))

    def _visit_class(self, cls: type, path: str, depth: int) -> None:
        self.entries.setdefault(path, Entry(cls.__qualname__, self._identity(cls)))
        if is_library_class(cls) or id(cls) in self._classes:
            return
        self._classes.add(id(cls))
        self._seen.setdefault(id(cls), (len(self._seen), cls, path))
        known = f"class {qualified_name(cls)}"
        while known in self.entries:  # of another class of the same name
            known += "'"
        self.entries[known] = Entry(cls.__qualname__, tuple(map(self._identity, cls.__mro__)))
        if isinstance(cls, abc.ABCMeta):
            others = filter(None, (registered() for registered in abc._get_dump(cls)[0]))  # type: ignore[attr-defined]
            self.entries[f"{known} registered"] = Entry("classes", sorted(map(self._identity, others)))
        if not is_library_class(type(cls)):
            self._visit_class(type(cls), f"class {qualified_name(type(cls))}", depth)
        for base in cls.__mro__:
            if is_library_class(base):
                continue
            for name, value in list(vars(base).items()):
                is_own = name == "__init__" and self._made_before(base)
                is_skipped = is_own or (name in SKIPPED_MEMBERS and name not in (self._names or ()))
                if is_skipped or isinstance(value, SLOTS):
                    continue
                is_special = name.startswith("__") and name.endswith("__")
                if is_special or self._is_read(name) or self._may_be_read(cls, name):
                    self._visit(value, f"dataset[1]['{qualified_name(base)}.{name}']", depth)

    def _visit_constructor(self, cls: type, depth: int) -> None:
        """Visits the constructors of a class, which run if a sample creates objects."""
        if self._made_before(cls):
            return
        for base in cls.__mro__:
            for name in () if is_library_class(base) else ("__init__", "__new__", "__post_init__"):
                if name in vars(base):
                    self._visit(vars(base)[name], f"dataset[1]['{qualified_name(base)}.{name}']", depth)

    def _made_before(self, cls: type) -> bool:
        """Whether a class is the dataset's own. A later run compares what its constructor has made."""
        return self._across_runs and cls is self._kind

    def _is_read(self, name: str) -> bool:
        if name in self._ignored:
            self.left_out.add(name)
            return False
        return self._names is None or name in self._names

    def _is_read_of(self, x: object, name: str) -> bool:
        """Whether code may read an attribute of an object. Which ones a library reads of its own objects is unknown."""
        if name == "_value_" or self._is_read(name):
            return True
        return (is_library_class(type(x)) and name not in self._ignored) or self._may_be_read(type(x), name)

    def _may_be_read(self, cls: type, name: str) -> bool:
        """Between runs, names decide only what is read of a dataset: a rare sample may run code that the trial did not,
        such as a method that a library calls by its name."""
        return self._across_runs and not issubclass(cls, Dataset) and name not in self._ignored

    # -- digests

    def _flat(self, x: object, *, plain: bool, path: str = "") -> bytes:
        """Digest of a value and all it contains. ``plain``: raises _NotPlain at the first object that is not plain."""
        sink = _Sink(self._digests)
        pickler = (_FlatAcrossRuns if self._across_runs else _Flat)(self, sink, plain, path)
        pickler.dump(x)
        self.nbytes += sink.nbytes
        return sink.hash.digest()

    def _add_opaque(self, path: str, x: object, why: str = "") -> None:
        self.entries[path] = self._opaque_entry(path, x, why)

    def let_go(self) -> Inputs:
        """Drops the references to objects, but for those that are known by their id: the script may delete one, and see
        that by a weak reference or ``__del__``. Returns self."""
        self._seen = {key: (n, None if path else x, path) for key, (n, x, path) in self._seen.items()}
        self.functions.clear()
        self.caches.clear()
        return self


class _Flat(pickle.Pickler):
    """Pickles a value with its items and their attributes by value: ``fast`` omits what depends on identity."""

    def __init__(self, inputs: Inputs, sink: _Sink, plain: bool, path: str) -> None:
        super().__init__(sink, 5)
        self.fast = True
        self._inputs = inputs
        self._plain = plain
        self._path = path

    def reducer_override(self, x: Held) -> Held:
        if x is _mark:
            return NotImplemented
        inputs = self._inputs
        leaf = inputs._leaf(x, self._path)
        is_users = leaf is None or inputs._is_users(type(x))
        if self._plain and is_users:
            raise _NotPlain
        if leaf is not None:
            digest = (leaf.digest,) if not leaf.is_opaque else (leaf.digest, "opaque")
            if is_users:
                inputs._visit_class(type(x), f"class {qualified_name(type(x))}", DEPTH // 2)
                digest = *digest, {k: v for k, v in attributes_of(x) if inputs._is_read_of(x, k)}
            return _mark, digest
        inputs._note_package(x)
        if id(x) in inputs._seen:
            return _mark, ("again", inputs._seen[id(x)][0])
        inputs._seen[id(x)] = len(inputs._seen), x, self._path
        cls = type(x)
        if isinstance(x, WRAPPERS):
            path = f"{self._path}<{inputs._seen[id(x)][0]}>"
            inputs._visit_inside(x, path, DEPTH // 2)
            return _mark, (path,)
        if not is_library_class(cls):
            inputs._visit_class(cls, f"class {qualified_name(cls)}", DEPTH // 2)
        state: dict[str, object] = {k: v for k, v in attributes_of(x) if inputs._is_read_of(x, k)}
        native = native_base(cls)
        value: object = None
        if isinstance(x, VALUES):
            value = _repr_of_library(x), getattr(x, "_value_", None)
        elif native in CONTAINERS:
            value = items_of(x, native)
        elif issubclass(native, (*PLAIN[:-1], bytearray)):
            value = native(x)
        elif native is not object:
            value, is_complete = inputs._native_state(x)
            if not is_complete:
                inputs.opaque[self._path] = (
                    f"{readable(self._path)} holds a {cls.__module__}.{cls.__qualname__}, whose state cannot be read"
                )
        return _mark, (qualified_name(cls), state, value)


class _FlatAcrossRuns(_Flat):
    """Writes sets in an order independent of hashes, which differ between processes; not those of numbers."""

    def persistent_id(self, x: Held) -> object:
        if type(x) not in (set, frozenset) or all(type(item) is int for item in x):
            return None
        self._inputs.depends_on_hashes |= any(type(item) is not int for item in x) and len(x) > 1
        return type(x).__name__, sorted(self._inputs._flat(item, plain=self._plain, path=self._path) for item in x)


def _absolute(name: str, scope: dict[str, Held]) -> str:
    """The name of a module that code imports, perhaps relative to its own package."""
    level = len(name) - len(name.lstrip("."))
    if not level:
        return name
    package = str(scope.get("__package__") or "").rsplit(".", level - 1)[0]
    return f"{package}.{name[level:]}".rstrip(".")


def _mark(*_: object) -> None:
    """Represents an object that is not a plain value in a digest."""


# -- what things are


def _named_otherwise(x: Held, path: str) -> str:
    """The name of a library's function or class if it is not that by which it is found: ``np.median = np.mean``. The
    others have no entry, because libraries load them when they are asked for."""
    name, module = getattr(x, "__name__", ""), getattr(x, "__module__", "")
    where = readable(path).split(".")
    is_own = str(module).partition(".")[0] == where[0] and name == where[-1]
    return "" if is_own else f"{module}.{name}"


def _repr_of_library(x: Held) -> str:
    """The repr of a user-class value, as its first library base class defines it."""
    base: Held = next(base for base in type(x).__mro__ if is_library_class(base))
    return str(base.__repr__(x))


def functions_of(dataset: object, more: Collection[object] = ()) -> list[types.FunctionType]:
    """The user's functions that may run while a dataset makes samples. ``more``: as in ``Inputs``."""
    return list(Inputs(dataset, more, digests=False).functions.values())
