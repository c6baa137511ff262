"""``%load_ext stoker``: the magics ``%%stoker`` and ``%stoker_apply`` for Jupyter and IPython."""

from __future__ import annotations

import ast
import contextlib
import contextvars
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..core.errors import UsageError
from ..core.progress import Progress
from ..diagnosis.report import inline
from ..diagnosis.session import Session
from ..diagnosis.watch import patch

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

REDRAW_S = 0.5  # seconds between redraws of the line; rarely, because forked workers may inherit a half-drawn one
CELL_LINE = re.compile(r"[^\s()'\",]*?([\w.<>-]+):(\d+)")


def load(shell: InteractiveShell) -> None:

    @functools.wraps(watched)  # so that its docstring is the magic's help
    def stoker(line: str, cell: str) -> object:
        __tracebackhide__ = True  # not in tracebacks of the cell's exceptions
        return watched(shell, line, cell)

    shell.register_magic_function(stoker, "cell", "stoker")
    shell.register_magic_function(applied, "line", "stoker_apply")


def unload(shell: InteractiveShell) -> None:
    """Removes the magics, and undoes ``%stoker_apply on``."""
    patch.apply_off()
    shell.magics_manager.magics["cell"].pop("stoker", None)
    shell.magics_manager.magics["line"].pop("stoker_apply", None)


def applied(line: str) -> None:
    """``%stoker_apply on`` gives loaders iterated from now on stoker's engine, cache and number of workers, as
    ``stoker run --apply`` does. ``%stoker_apply off`` gives loaders iterated after it torch's again."""
    word = line.strip()
    if word == "on":
        patch.apply_on()
    elif word == "off":
        patch.apply_off()
    else:
        raise UsageError(f"%stoker_apply must be followed by on or off, not {word!r}")


def watched(shell: InteractiveShell, line: str, cell: str) -> object:
    """``%%stoker`` runs the cell, watches the loaders that it iterates, and shows the report. The cell's value and
    exceptions are the same as without it."""
    __tracebackhide__ = True
    if line.strip():
        raise UsageError(f"%%stoker takes no arguments, but got {line.strip()!r}; put the code on the next line")
    with Session(lambda text: _named(shell, text)) as session, _shown(shell, session):
        return _run(shell, cell)


def _run(shell: InteractiveShell, cell: str) -> object:
    """Runs the code of a cell as the shell does. Returns the value of a last expression that has no semicolon."""
    __tracebackhide__ = True
    source = shell.transform_cell(cell)
    name = shell.compile.cache(source, len(shell.user_ns.get("In", "?")) - 1, raw_code=cell)  # In[n] is this cell
    tree = shell.transform_ast(ast.parse(source, name))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(shell.compile(tree, name, "exec"), shell.user_ns)
    if not isinstance(last, ast.Expr):
        return None
    value: object = eval(shell.compile(ast.Expression(last.value), name, "eval"), shell.user_ns)
    return None if source.rstrip().endswith(";") else value


@contextlib.contextmanager
def _shown(shell: InteractiveShell, session: Session) -> Iterator[None]:
    """Shows the loops' progress while the block runs, then the report in its place."""
    if getattr(shell, "kernel", None) is None:
        with Progress("the loaders", doing="watching") as progress, _every(lambda: progress(session.live())):
            yield
        sys.stdout.write(f"{session}\n")
        return
    from IPython.display import HTML, display

    place = display(HTML(inline.line("stoker: watching")), display_id=True)
    try:
        with _every(lambda: place.update(HTML(inline.line(session.live())))):
            yield
    finally:
        place.update(session.stop())


def _named(shell: InteractiveShell, text: str) -> str:
    """Replaces lines of cells by names like ``In[3]:5``, because the cells' file names mean nothing to users."""
    numbers = getattr(shell.compile, "_filename_map", {})
    cells = {name.rsplit("/", 1)[-1]: number for name, number in numbers.items()}

    def shown(found: re.Match[str]) -> str:
        number = cells.get(found[1])
        return found[0] if number is None else f"In[{number}]:{found[2]}"

    return CELL_LINE.sub(shown, text)


@contextlib.contextmanager
def _every(draw: Callable[[], object]) -> Iterator[None]:
    """Calls ``draw`` every ``REDRAW_S`` in a separate thread, until the block ends."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(REDRAW_S):
            with contextlib.suppress(Exception):  # a missing line does no harm
                draw()

    # Run in the cell's context, from which Jupyter tells to which cell an output belongs.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="stoker_line", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
