"""Observes the Python code that runs while a sample is made: what it names and changes, and which system values it
reads."""

from __future__ import annotations

import ast
import contextlib
import copy
import datetime
import dis
import functools
import inspect
import itertools
import linecache
import logging
import multiprocessing
import os
import random
import re
import sys
import threading
import time
import types
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Set
from typing import TypeVar

import numpy as np
from torch.utils.data import Dataset
from torch.utils.data._utils import worker as torch_worker

from ..core.garbage import no_collection
from ..core.packages import PACKAGE, in_stdlib, is_users
from ..core.types import Attributes
from . import syntax
from .callee import Value, member
from .source import HELPER, known_tree
from .switches import names_stored, scope_of, switched_on
from .users_code import codes_of, is_users_code, matches_positions, strings_in

T = TypeVar("T")
CLOSED = {"torch", "numpy"}  # packages whose functions are treated as a whole, never cut
NATIVE_FUNCTIONS = (types.BuiltinFunctionType, types.MethodType, type(len), np.ufunc)
OBJECTS = 64  # held for each attribute, at most
BY_NAME = {"getattr", "vars", "__dict__", "eval", "exec", "attrgetter", "asdict", "astuple"}
ENTROPY: dict[object, str] = {os.urandom: "os.urandom"}
if hasattr(os, "getrandom"):
    ENTROPY[os.getrandom] = "os.getrandom"
# Native functions that draw from their own generator, or seed one from the system.
NATIVE_RANDOM = {  # by name: types of the objects that they belong to
    **dict.fromkeys(("randu", "randn", "randShuffle", "theRNG"), ("NoneType",)),  # cv2's
    **dict.fromkeys(("effect_spread", "effect_noise"), ("ImagingCore",)),  # Pillow's
    "seed": ("Generator",),  # torch's
    "spawn": ("Generator", "BitGenerator", "PCG64", "MT19937", "Philox", "SFC64", "SeedSequence"),  # NumPy's
}
CLOCKS: dict[object, str] = {
    print: "print",  # for some samples with a text, for others perhaps without one
    id: "id",
    hash: "hash",
    os.getpid: "os.getpid",
    os.getppid: "os.getppid",
    threading.get_ident: "threading.get_ident",
    threading.get_native_id: "threading.get_native_id",
    **{fn: fn.__qualname__ for fn in (datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today)},
    datetime.date.today: "date.today",
    os.times: "os.times",
    **{getattr(time, name): f"time.{name}" for name in ("localtime", "gmtime", "strftime", "ctime", "asctime")},
    time.clock_getres: "time.clock_getres",
}
for clock in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"):
    CLOCKS |= {getattr(time, name): f"time.{name}" for name in (clock, f"{clock}_ns")}
# Opcodes that assign to or delete anything but local variables.
STORES = {
    dis.opmap[name]
    for verb, what in itertools.product(("STORE", "DELETE"), ("ATTR", "SUBSCR", "SLICE", "GLOBAL", "NAME", "DEREF"))
    if (name := f"{verb}_{what}") in dis.opmap
}
UUIDS = {uuid.uuid1.__code__: "uuid.uuid1"}  # based on the clock
# Functions that tell the user's code which process or thread it runs in, or answer from a state that has no value to
# compare.
PROCESS = {
    logging.log.__code__: "logging.log",  # with a level that may be another for each sample
    logging.Logger.log.__code__: "Logger.log",
    linecache.getline.__code__: "linecache.getline",
    linecache.getlines.__code__: "linecache.getlines",
    multiprocessing.current_process.__code__: "multiprocessing.current_process",
    multiprocessing.parent_process.__code__: "multiprocessing.parent_process",
    threading.current_thread.__code__: "threading.current_thread",
    threading.active_count.__code__: "threading.active_count",
    threading.enumerate.__code__: "threading.enumerate",
}
PRINTS = {"print", "logging.log", "Logger.log"}  # among what is asked: perhaps for some samples only
SEEDS = random.Random.seed.__code__
# Functions that read the state of a generator, which draws change.
READ_STATE = {"initial_seed", "get_rng_state", "get_state", "getstate"}


class WorkerInfo:
    """Substitute for torch's ``WorkerInfo`` in a trial. Worker id and seed differ between epochs and workers."""

    num_workers = 2

    def __init__(self, dataset: object, asked: Callable[[str], None], seed: int) -> None:
        self.dataset = dataset
        self._asked = asked
        self._seed = seed

    @property
    def id(self) -> int:
        self._asked("get_worker_info().id")
        return self._seed % 2

    @property
    def seed(self) -> int:
        self._asked("get_worker_info().seed")
        return self._seed


@contextlib.contextmanager
def in_worker(info: object) -> Iterator[None]:
    """Makes ``get_worker_info()`` return ``info`` inside the ``with``."""
    before = torch_worker._worker_info
    torch_worker._worker_info = info  # type: ignore[assignment]
    try:
        yield
    finally:
        torch_worker._worker_info = before


class Executed:
    """What is known about the Python code that ran for a sample, from a profile function (``sys.setprofile``)."""

    def __init__(self, dataset: object, lasting: Collection[int] = ()) -> None:
        self._dataset = dataset
        self.lasting = lasting  # ids of objects that existed before the code ran; (): unknown
        # attributes, globals and strings mentioned in the code, including the user's functions that it names
        self.names: set[str] = set()
        self.user_names: set[str] = set()  # those mentioned outside libraries
        self.variables: set[tuple[str, str]] = set()  # module and name of the global variables among them with values
        self.changes = ""  # what the dataset's own methods assign to that outlives a call; "" if nothing
        self.asks = ""  # a function that answers differently each time (clock, system entropy), and was called
        self.assigned: set[str] = set()  # attributes that methods of datasets, also inner ones, assign to in any branch
        self._written: dict[types.CodeType, frozenset[str]] = {}  # by user function: see ``names_written``
        self.changed_arguments: list[object] = []  # that functions modify
        self._calls = Counter[types.CodeType]()  # whose arguments were noted
        self._written_by_run: set[types.CodeType] = set()  # user functions that ran for a lasting object
        self.stored: dict[str, list[object]] = {}  # by attribute: objects whose methods assign it, not the dataset
        self.looks_up_names = False  # the user's code looks up attributes by computed names
        self._run: set[types.CodeType] = set()
        self._seen: set[types.CodeType] = set()
        self._classes: dict[type, None] = {}

    @property
    def users_code(self) -> set[types.CodeType]:
        """The user's functions that ran."""
        return {code for code in self._run if is_users_code(code)}

    @property
    def written(self) -> set[str]:
        """Attributes and global variables that the user's code changes, in any branch that no setting disables."""
        return set().union(*self._written.values())

    @property
    def stored_in_lasting(self) -> set[str]:
        """Attributes of objects outliving the sample that methods, including those of libraries, assign to."""
        return {name for name, objects in self.stored.items() if any(id(x) in self.lasting for x in objects)}

    def run(self, fn: Callable[[], T]) -> T:
        """Runs a function as if in a worker process, and observes each Python function that it calls."""
        info = WorkerInfo(self._dataset, self._ask, next(_worker_seeds))
        with in_worker(info):
            threading.setprofile(self._profile)  # for threads that it starts
            sys.setprofile(self._profile)
            try:
                return fn()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)

    def _ask(self, what: str) -> None:
        self.asks = self.asks or what

    def _profile(self, frame: types.FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "c_call":
            self._note_call(frame, arg)
            return
        if event != "call":
            return
        self._note_python_call(frame, code)
        first = _first_name(code)
        if first == ".0" and code in self._run:
            return  # a generator expression is called once per item
        bound = frame.f_locals.get(first) if first else None
        if bound is not None and not isinstance(bound, type):
            self._classes[type(bound)] = None
        if code.co_filename.startswith(PACKAGE):
            return
        if bound is not None and bound is not self._dataset:
            self._note_stored(code, bound)
        self._note_written(frame, first, bound)
        if code in self._run:
            return
        self._run.add(code)
        read = READ_STATE.intersection(code.co_names)
        if read and is_users_code(code):
            scope = (frame.f_globals.get(name) for name in code.co_names)
            of_random = "random" in code.co_names or any(x is random or x is np.random for x in scope)
            if of_random or not read <= {"get_state", "getstate"}:
                self._ask(min(read))
        self._note(code, frame.f_globals)
        if bound is self._dataset or isinstance(bound, Dataset):
            self._note_changes(frame, first, bound)

    def _note_stored(self, code: types.CodeType, bound: object) -> None:
        """Records the attributes that an object's running method assigns to."""
        for name in names_stored(code):
            objects = self.stored.setdefault(name, [])
            if len(objects) < OBJECTS and not any(x is bound for x in objects):
                objects.append(bound)

    def _note_python_call(self, frame: types.FrameType, code: types.CodeType) -> None:
        """Records calls of standard-library functions whose result differs each time."""
        if code in UUIDS:
            self._ask(UUIDS[code])
        if code in PROCESS and frame.f_back is not None and is_users_code(frame.f_back.f_code):
            self._ask(PROCESS[code])
        if code is SEEDS and frame.f_locals.get("a") is None:
            self._ask("random.seed without a number")

    def _note_written(self, frame: types.FrameType, first: str, bound: object) -> None:
        """Records what a running user function changes, if that outlives the sample."""
        code = frame.f_code
        if is_users_code(code) and self._calls[code] < OBJECTS:
            self._calls[code] += 1
            self.changed_arguments += [frame.f_locals[x] for x in _written(code).arguments if x in frame.f_locals]
        if code in self._written_by_run or not is_users_code(code) or not any(_written(code)):
            return
        if self.lasting and bound is not None and not isinstance(bound, type) and id(bound) not in self.lasting:
            self._written.setdefault(code, frozenset())  # a method of an object that was created for this sample
            return
        self._written_by_run.add(code)
        self._written[code] = _without_modules(_written(code), frame.f_globals)
        tree = known_tree(code)
        if tree is None:
            return
        on = copy.copy(tree)
        on.body = [switched_on(x, scope_of(tree, frame.f_globals, first, bound)) for x in tree.body]
        self._written[code] = _without_modules(syntax.names_written(on, first), frame.f_globals)

    def _note_call(self, frame: types.FrameType, called: Value) -> None:
        try:
            asks = ENTROPY.get(called)
            if asks is not None and _is_seeded_anyway(frame):
                return
            if asks is None and called in CLOCKS and is_users_code(frame.f_code):
                asks = CLOCKS[called]
            name = getattr(called, "__name__", "")
            if asks is None and type(getattr(called, "__self__", None)).__name__ in NATIVE_RANDOM.get(name, ()):
                asks = f"{name} of native code"
        except TypeError:  # a method of something that has no hash
            return
        self.asks = self.asks or asks or ""

    def _note(self, code: types.CodeType, scope: Attributes) -> None:
        """Records the names in a function, and in the user's functions that it names."""
        waiting = [(code, scope)]
        while waiting:
            code, scope = waiting.pop()
            if code in self._seen:
                continue
            self._seen.add(code)
            waiting += [(c, scope) for c in code.co_consts if isinstance(c, types.CodeType)]
            names = {*code.co_names, *strings_in(code.co_consts)}
            self.names |= names
            if not is_users_code(code):
                continue
            self.user_names |= names
            self._written.setdefault(code, _without_modules(_written(code), scope))
            by_name = bool(BY_NAME & set(code.co_names)) or _formats_attributes(code)
            self.looks_up_names |= by_name or matches_positions(code)
            for name in code.co_names:
                value = scope.get(name, types)
                module = str(scope.get("__name__", ""))
                self.variables.update((module, path) for path in _values_named(code, name, value))
                for fn in self._functions(name, value):
                    waiting.append((fn.__code__, fn.__globals__))
                    self.names.update(fn.__code__.co_freevars)  # a counter of the function that made it

    def _functions(self, name: str, value: object) -> Iterator[types.FunctionType]:
        """User functions that a name may refer to: a global one, or a method of an object seen so far."""
        if name == "__getitem__":
            return  # that is the function being cut; its part before the cut has run
        members = (member(c, name) for c in (type(self._dataset), *self._classes))
        for found in (value, *members):
            for fn in _functions_in(found):
                if is_users_code(fn.__code__):
                    yield fn

    def _note_changes(self, frame: types.FrameType, first: str, bound: object) -> None:
        """Records what a dataset's method assigns to, even in branches not taken, unless a setting disables them."""
        tree = known_tree(frame.f_code) if assigns_outside(frame.f_code) else None  # else its file is not parsed
        if tree is None:
            return
        self.assigned |= syntax.attributes_assigned(tree, first)
        if bound is not self._dataset:
            return
        locals_, scope = syntax.local_variables(tree), scope_of(tree, frame.f_globals, first, bound)
        for statement in tree.body:
            if not self.changes and not syntax.is_setup(statement, first):
                self.changes = syntax.changes_state(switched_on(statement, scope), locals_, scope)


def _formats_attributes(code: types.CodeType) -> bool:
    """Whether a function formats texts such as "{c.zoom}"."""
    texts = (c for c in code.co_consts if isinstance(c, str))
    return "format" in code.co_names and any(re.search(r"\{\w*[.\[]", text) for text in texts)


def _functions_in(x: Value) -> Iterator[types.FunctionType]:
    """Yields a function, or what a decorator wraps, or what a descriptor such as ``cached_property`` calls."""
    if isinstance(x, property):
        held = [x.fget]
    elif isinstance(x, (staticmethod, classmethod)):
        held = [x.__func__]
    else:
        # Not getattr(x, "__wrapped__"): a config class with __getattr__ = dict.__getitem__ raises KeyError.
        own = getattr(x, "__dict__", None) or {}
        is_descriptor = hasattr(type(x), "__get__") and not isinstance(x, types.FunctionType)
        held = [own.get("__wrapped__", x), *((*own.values(), type(x).__get__) if is_descriptor else ())]
    yield from (fn for fn in held if isinstance(fn, types.FunctionType))


_worker_seeds = itertools.count(0x5EED)


def written_by(fn: types.FunctionType) -> frozenset[str]:
    """Names of attributes and global variables that a user function may change."""
    return _without_modules(_written(fn.__code__), fn.__globals__)


def written_through_locals(fn: types.FunctionType) -> Set[str]:
    """Those of ``written_by`` that are modified through a local variable: ``x = self.kept[i]; x.mul_(2)``."""
    tree = known_tree(fn.__code__)
    return set() if tree is None else syntax.names_written(tree, _first_name(fn.__code__)).through_locals


def _without_modules(written: syntax.NamesWritten, scope: Attributes) -> frozenset[str]:
    """Drops modules: ``np.sort(x)`` changes nothing in ``np``."""
    return frozenset(
        {*written.names, *(x for x in written.variables if not isinstance(scope.get(x), types.ModuleType))}
    )


@functools.lru_cache(maxsize=4096)
def _written(code: types.CodeType) -> syntax.NamesWritten:
    by_standard_library = code.co_name.startswith("__") or code.co_varnames[:1] == ("_cls",)  # dataclass, namedtuple
    is_generated = code.co_filename == "<string>" and by_standard_library
    is_part = HELPER in code.co_varnames  # of a function that runs whole
    if code.co_name == "__init__" or is_generated or is_part:
        return syntax.NamesWritten()
    tree = known_tree(code)
    return syntax.NamesWritten(names_stored(code)) if tree is None else syntax.names_written(tree, _first_name(code))


def _first_name(code: types.CodeType) -> str:
    """Name of a function's first parameter; "" if it has none."""
    return code.co_varnames[0] if code.co_argcount else ""


def _is_seeded_anyway(frame: types.FrameType) -> bool:
    """Whether the entropy is requested by ``np.random.RandomState(seed)``, which creates a generator seeded by the
    system before it sets the seed (numpy/random/mtrand.pyx)."""
    caller = frame.f_back  # compiled code has no frame
    if frame.f_code is not random.SystemRandom.getrandbits.__code__ or caller is None:
        return False
    if not hasattr(caller.f_code, "co_positions"):  # Python 3.10
        return False
    first, last, begin, end = next(itertools.islice(caller.f_code.co_positions(), caller.f_lasti // 2, None))
    if first is None or last is None or begin is None or end is None:
        return False
    lines = [linecache.getline(caller.f_code.co_filename, k).encode() for k in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    try:
        with no_collection():
            call = ast.parse(b"".join(lines).decode(), mode="eval").body
    except (SyntaxError, ValueError):
        return False
    is_given = isinstance(call, ast.Call) and any(call.args + [k.value for k in call.keywords])
    return is_given and ast.unparse(call.func).endswith("RandomState")  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)
def globals_read(code: types.CodeType) -> frozenset[str]:
    """Names of global variables that a function reads. Not ``co_names``, which includes attributes: ``self.images``
    must not be mistaken for a variable ``images`` of the script."""
    return frozenset(op.argval for op in dis.get_instructions(code) if op.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


def globals_named(fn: types.FunctionType, names: Collection[str]) -> set[tuple[str, str]]:
    """Module and name of the global variables among some names in a function, as in ``Executed.variables``."""
    module = str(fn.__globals__.get("__name__", ""))
    found = ((name, fn.__globals__[name]) for name in names if name in fn.__globals__)
    return {(module, path) for name, value in found for path in _values_named(fn.__code__, name, value)}


def _values_named(code: types.CodeType, name: str, value: object) -> list[str]:
    """Paths of the values that code reads from a global variable: the variable itself; for a user's class, function or
    module, the attributes that the code names and that are not functions: ``CONFIG.size``."""
    if isinstance(value, NATIVE_FUNCTIONS) or value is types or name not in globals_read(code):
        return []
    if not isinstance(value, (type, types.FunctionType, types.ModuleType)):
        return [name]
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(value.__module__)
    file = getattr(module, "__file__", None)
    if module is None or module.__name__ in sys.builtin_module_names or (file and not is_users(file)):
        return []
    found = ((attribute, inspect.getattr_static(value, attribute, None)) for attribute in code.co_names)
    return [f"{name}.{a}" for a, held in found if held is not None and not hasattr(type(held), "__get__")]


def assigns_outside(code: types.CodeType) -> bool:
    """Whether a function, or one nested in it, assigns to anything but local variables."""
    return any(not STORES.isdisjoint(c.co_code[::2]) for c in codes_of(code))


def is_closed(fn: types.FunctionType, also: tuple[str, ...] = ()) -> bool:
    """Whether a function runs unmodified, neither cut nor surveyed. True for functions of the standard library, torch,
    NumPy and stoker, and for files in the folders ``also``; not for ``torch.utils.data`` (``Subset``)."""
    module = fn.__module__ or ""
    if module.startswith("torch.utils.data"):
        return False
    file = fn.__code__.co_filename
    return in_stdlib(file) or file.startswith((PACKAGE, *also)) or module.partition(".")[0] in CLOSED
