"""Waits for ``torch.utils.data.dataloader`` to be imported and then puts the watch on it. Standard library only."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

TARGET = "torch.utils.data.dataloader"


class _Loader(importlib.abc.Loader):
    def __init__(self, real: Any) -> None:
        self._real = real

    def create_module(self, spec: Any) -> Any:
        return self._real.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._real.exec_module(module)
        _on_first_loader(module)

    def __getattr__(self, name: str) -> Any:  # get_source and the like, for tracebacks
        return getattr(self._real, name)


def _on_first_loader(module: Any) -> None:
    """torch is half imported now; the watch needs all of it, so it waits for the first loader."""
    original = module.DataLoader.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if module.DataLoader.__init__ is __init__:
            module.DataLoader.__init__ = original
            _attach(module)
        module.DataLoader.__init__(self, *args, **kwargs)

    __init__.__wrapped__ = original  # type: ignore[attr-defined]  # what inspect.signature shows
    module.DataLoader.__init__ = __init__


def _attach(module: Any) -> None:
    home = os.environ.get("STOKER_HOME", "")
    sys.path.append(home)  # last: it must not shadow anything of the script's
    try:
        from stoker import watching
    except Exception as e:
        sys.stderr.write(f"stoker: not watching this process: {type(e).__name__}: {e}\n")
        return
    finally:
        if home in sys.path:
            sys.path.remove(home)
    watching.attach(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
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
