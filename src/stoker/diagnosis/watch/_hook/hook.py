"""Waits until ``torch.utils.data.dataloader`` is imported, then attaches the watch. Standard library only."""

import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TARGET = "torch.utils.data.dataloader"


class _Loader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        global waiting
        self._real.exec_module(module)
        waiting = _Waiting(module)

    def __getattr__(self, name: str) -> object:  # get_source and the like, for tracebacks
        return getattr(self._real, name)


class _Waiting:
    """Starts the watch when a script creates its first loader or iterator, or defines its first loader class.

    While torch's loader module executes, torch is only half imported, and the watch needs all of it. So this class
    replaces a few of torch's methods now, permanently. Each replacement starts the watch on its first call, then calls
    the function in ``replaced``: torch's, or the watch's. The methods are never replaced again or restored, because
    frameworks wrap them temporarily and then restore what they found (Lightning wraps every loader class's
    ``__init__``).
    """

    def __init__(self, module: ModuleType) -> None:
        self._module, self._begun, self._lock = module, False, threading.RLock()
        self.replaced: dict[tuple[object, str], Callable[..., object]] = {}
        for cls in (module.DataLoader, module._SingleProcessDataLoaderIter, module._MultiProcessingDataLoaderIter):
            self._wait(cls)
        self._wait_for_subclasses(module.DataLoader)

    def _wait(self, cls: Any) -> None:
        key = cls, "__init__"
        original = self.replaced[key] = vars(cls)["__init__"]

        @functools.wraps(original)
        def __init__(*args: object, **kwargs: object) -> None:
            self.begin()
            self.replaced[key](*args, **kwargs)

        cls.__init__ = __init__

    def _wait_for_subclasses(self, base: Any) -> None:
        key = base, "__init_subclass__"
        self.replaced[key] = lambda cls: None

        def __init_subclass__(cls: Any, **kwargs: object) -> None:
            super(base, cls).__init_subclass__(**kwargs)
            if not cls.__module__.startswith("torch."):
                self.begin()
                self.replaced[key](cls)

        base.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[arg-type]

    def begin(self) -> None:
        if self._begun:
            return
        with self._lock:  # another thread's first loader waits until the watch is attached
            if not self._begun:
                self._begun = True
                _attach(self._module, self.replaced)


waiting: _Waiting | None = None  # set once torch is imported; ``patch`` begins it if a callback comes first


def _attach(module: ModuleType, replaced: dict[tuple[object, str], Callable[..., object]]) -> None:
    collects = gc.isenabled()
    gc.disable()  # importing about 150 modules triggers a full collection: 70 ms over torch's objects
    try:
        patch = _import_patch()
        if patch is not None:
            if os.environ.get("STOKER_APPLY") == "1":
                from stoker.core import warn

                warn.to_terminal()
            patch.attach(module, replaced)
    finally:
        if collects:
            gc.enable()


def _import_patch() -> ModuleType | None:
    """Imports and returns ``patch``; if this Python cannot import it, writes a line to stderr and returns None."""
    home = os.environ.get("STOKER_HOME", "")
    sys.path.append(home)  # last, so that it shadows none of the script's modules
    try:
        from stoker.diagnosis.watch import patch
    except Exception as e:
        sys.stderr.write(f"stoker: not watching this process: {type(e).__name__}: {e}\n")
        return None
    finally:
        if home in sys.path:
            sys.path.remove(home)
    return patch


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def arm() -> None:
    """Called once per interpreter, before the script's first line."""
    sys.meta_path.insert(0, _Finder())
