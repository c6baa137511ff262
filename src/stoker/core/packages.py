"""Which package a file of Python code belongs to, by the folder that the package is installed in.

Names of folders prove nothing: a project may be cloned into a folder called ``stoker``, and scripts may be in one
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
    """The folder of a file, with a separator at its end."""
    return os.path.join(os.path.dirname(os.path.abspath(path)), "")


PACKAGE = folder(os.path.dirname(os.path.abspath(__file__)))  # stoker's own; this file is one folder deeper
OWN = (PACKAGE, f"{PACKAGE[:-1]}_")  # and packages beside it, as ``stoker_ray``
STDLIB = folder(os.__file__)
IPYTHON_CELL = "<ipython-input-"  # the file of what is typed into IPython; Jupyter names one of /tmp


@functools.cache
def torch() -> str:
    """torch's folder, found without importing torch; a path that no file has, if torch is not installed."""
    spec = importlib.util.find_spec("torch")
    return folder(spec.origin) if spec is not None and spec.origin else "\0"


@functools.cache
def torch_file(*names: str) -> str:
    """A file of torch's, as its code objects name it: ``torch_file("utils", "data", "dataset.py")``."""
    return os.path.join(torch(), *names)


@functools.cache
def libraries() -> tuple[str, ...]:
    """Folders of installed packages: the interpreter's own, and those of ``sys.path`` in which an installer has left
    its records, but not the script's own folder."""
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
    """The file's path inside the folder of installed packages, or of the standard library; "" for other files.

    Example:
        >>> installed(contextlib.__file__)
        'contextlib.py'
    """
    folders = sorted((*libraries(), STDLIB), key=len, reverse=True)
    return next((path[len(f) :] for f in folders if path.startswith(f)), "")


def in_stdlib(path: str) -> bool:
    """Whether the file is of the standard library; installed packages may be inside its folder."""
    return path.startswith(STDLIB) and not path.startswith(libraries())


@functools.cache  # a sampler of stacks asks for each frame
def is_users(path: str) -> bool:
    """Whether code is neither stoker's nor a library's."""
    if path.startswith(IPYTHON_CELL):
        return True
    return not path.startswith(("<", *OWN, torch())) and not installed(path)
