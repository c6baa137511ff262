"""Tells which package a Python file belongs to, from the folder in which the package is installed.

Folder names alone prove nothing: a project may be cloned into a folder called ``stoker``, and scripts may lie in one
called ``multiprocessing``.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.util
import os
import site
import sys
import sysconfig


def folder(path: str) -> str:
    """The folder of a file, with a trailing separator."""
    return os.path.join(os.path.dirname(os.path.abspath(path)), "")


PACKAGE = folder(os.path.dirname(os.path.abspath(__file__)))  # stoker's own; this file is one folder deeper
OWN = (PACKAGE, f"{PACKAGE[:-1]}_")  # and packages beside it, such as ``stoker_ray``
STDLIB = folder(os.__file__)
IPYTHON_CELL = "<ipython-input-"  # file name of code typed into IPython; Jupyter uses a file in /tmp


@functools.cache
def torch() -> str:
    """torch's folder, found without importing torch; a path that no file can have if torch is not installed."""
    spec = importlib.util.find_spec("torch")
    return folder(spec.origin) if spec is not None and spec.origin else "\0"


@functools.cache
def torch_file(*names: str) -> str:
    """A file of torch's, under the name that its code objects have: ``torch_file("utils", "data", "dataset.py")``."""
    return os.path.join(torch(), *names)


@functools.cache
def libraries() -> tuple[str, ...]:
    """Folders of installed packages: the interpreter's own, and those on ``sys.path`` that contain ``.dist-info``
    records. Excludes the script's own folder."""
    found = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    with contextlib.suppress(AttributeError):  # the "site" of an old virtualenv has no such functions
        found += [*site.getsitepackages(), site.getusersitepackages()]
    own = getattr(sys.modules.get("__main__"), "__file__", None)
    script = os.path.dirname(os.path.abspath(own)) if own else os.getcwd()
    for path in sys.path:
        if path and os.path.abspath(path) != script and glob.glob(os.path.join(glob.escape(path), "*.dist-info")):
            found.append(path)
    return tuple({os.path.join(resolve(path), "") for path in found for resolve in (os.path.abspath, os.path.realpath)})


def installed(path: str) -> str:
    """The file's path relative to the folder of installed packages or of the standard library; "" for other files."""
    folders = sorted((*libraries(), STDLIB), key=len, reverse=True)
    return next((path[len(f) :] for f in folders if path.startswith(f)), "")


def in_stdlib(path: str) -> bool:
    """Whether a file is part of the standard library. Installed packages inside its folder do not count."""
    return path.startswith(STDLIB) and not path.startswith(libraries())


@functools.cache  # the stack sampler calls this for each frame
def is_users(path: str) -> bool:
    """Whether a file contains the user's code: neither stoker's nor a library's."""
    if path.startswith(IPYTHON_CELL):
        return True
    return not path.startswith(("<", *OWN, torch())) and not installed(path)
