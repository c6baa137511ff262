"""Checks whether worker processes can be started, before any is.

A failed start cannot always be undone: under spawn and forkserver, a new interpreter imports the script's main module,
which reruns everything outside ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import ast
import multiprocessing
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import torch.multiprocessing

from ..core import packages, processes
from ..core.picklable import culprit, refused
from ..core.types import LoaderLike

# Statements that are safe in a module that is imported twice. A bare call (``print``, ``main()``) or a loop is not:
# workers that stoker starts on its own initiative must not repeat what the script does.
DEFINES = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete, ast.Assert, ast.Pass),
)
_failed: list[str] = []


def why_not(loader: LoaderLike, threads: bool = False) -> str:
    """Returns why stoker must not add worker processes to a loader on its own initiative; "" if it may. With
    ``threads``, other threads running the script's code also count as a reason."""
    if multiprocessing.current_process().daemon:
        return (
            "this process is daemonic (a worker of a multiprocessing.Pool, for example), so it cannot start processes"
        )
    if _failed:
        return _failed[0]
    method = processes.method_of(getattr(loader, "multiprocessing_context", None) or torch.multiprocessing)
    if method == "fork":
        thread = thread_of_script() if threads else ""
        return thread and (
            f"thread {thread} runs the script's code: forked workers would see neither its changes nor its locks"
        )
    line = line_run_again(calls=True)
    if line:
        return f"a worker started by {method} would run line {line} of the script again"
    for name in ("dataset", "collate_fn", "worker_init_fn"):
        value = getattr(loader, name, None)
        if refused(value) is not None:
            return f"{culprit(value, name)} cannot be pickled, which {method} needs"
    return ""


def failed(how: str) -> None:
    """Tells ``why_not`` that workers of this process hang, die or cannot be started, as other loaders' may."""
    _failed.append(how)


def can_start_elsewhere(needed: object) -> bool:
    """Whether ``needed`` can be pickled, and the main module imported without running the script."""
    return not line_run_again() and refused(needed) is None


def line_run_again(calls: bool = False) -> int:
    """Returns the main module's line that is running now and would run again when a new interpreter imports the module;
    0 if there is none. With ``calls``, also finds a line that does more than define something."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is None:  # a notebook or an interpreter: nothing is imported
        return 0
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return 1
    running = next((f.f_lineno for f in _frames() if f.f_globals is vars(main) and f.f_code.co_name == "<module>"), 0)
    for statement in _unguarded(tree.body):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        runs = statement.lineno <= running <= (statement.end_lineno or 0)
        if runs or (calls and not is_text and not isinstance(statement, DEFINES)):
            return statement.lineno
    return 0


def thread_of_script() -> str:
    """Returns the name of another thread that is running the script's own code; "" if there is none. In forked workers
    the locks that it holds would stay locked forever, and its later changes would be invisible."""
    frames = _frames_of_others()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None and any(packages.is_users(f.f_code.co_filename) for f, _ in walk_stack(frame)):
            return thread.name
    return ""


def _unguarded(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that importing a module runs; descends into ``if``, ``with`` and ``try``."""
    for statement in body:
        if isinstance(statement, ast.If) and _is_guard(statement.test):
            yield from _unguarded(statement.orelse)
        elif isinstance(statement, (ast.If, ast.With, ast.Try)):
            parts = [statement, *getattr(statement, "handlers", ())]
            for part in parts:
                for name in ("body", "orelse", "finalbody"):
                    yield from _unguarded(getattr(part, name, ()))
        else:
            yield statement


def _is_guard(test: ast.expr) -> bool:
    """Whether this is ``__name__ == "__main__"``, alone or as an operand of ``and``."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and any(map(_is_guard, test.values))
    return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _frames() -> Iterator[FrameType]:
    for frame in (sys._getframe(), *_frames_of_others().values()):
        yield from (f for f, _ in walk_stack(frame))


def _frames_of_others() -> dict[int, FrameType]:
    """The frames of the other threads. A variable with the own frame would keep all callers' variables alive, loaders
    and datasets among them, until the next garbage collection."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return frames
