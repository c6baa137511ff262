"""Waits for ``torch.utils.data.dataloader`` to be imported and then puts the watch on it. Standard library only."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

TARGET = "torch.utils.data.dataloader"


class _Loader(importlib.abc.Loader):
    def __init__(self, real):
        self._real = real

    def create_module(self, spec):
        return self._real.create_module(spec)

    def exec_module(self, module):
        self._real.exec_module(module)
        try:
            sys.path.append(os.environ["STOKER_HOME"])  # last: it must not shadow anything of the script's
            from stoker import watch
        except Exception as e:
            sys.stderr.write(f"stoker: not watching this process: {type(e).__name__}: {e}\n")
            return
        finally:
            if os.environ["STOKER_HOME"] in sys.path:
                sys.path.remove(os.environ["STOKER_HOME"])
        watch.attach(module)

    def __getattr__(self, name):  # get_source and the like, for tracebacks
        return getattr(self._real, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def arm():
    """Called once per interpreter, before the script's first line."""
    sys.meta_path.insert(0, _Finder())
