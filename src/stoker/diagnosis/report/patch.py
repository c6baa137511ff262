"""Turns findings' changes of settings into a diff of the user's own file, to read and to ``git apply``."""

from __future__ import annotations

import ast
import difflib
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...core.types import JsonObject
from .schema import Finding

# Causes that --apply can fix.
FIXED_BY_APPLY = ("main_process_loading", "too_few_workers", "slow_transport", "cacheable_prefix")
STAGED, ENGINE = "staged", "engine"  # not arguments of DataLoader: they wrap the dataset, and replace the class
STAGES = b"stoker.Staged("
MODULES = ("torch.utils.data", "utils.data", "data")  # names under which torch's module is used
POSITIONAL = 5  # with more positional arguments, num_workers may be among them


def changes(findings: Iterable[Finding]) -> dict[str, JsonObject]:
    """Returns, by loader, the settings that the findings ask for. If two disagree, the first wins."""
    out: dict[str, JsonObject] = {}
    for finding in findings:
        if finding.change and finding.loader:
            out[finding.loader] = {**finding.change, **out.get(finding.loader, {})}
    return out


def of(wanted: Mapping[str, JsonObject]) -> str:
    """Returns a unified diff. It omits a file that cannot be read, and a loader that no plain call creates."""
    files: dict[str, dict[int, JsonObject]] = {}
    for name, settings in wanted.items():
        path, _, line = name.rpartition(":")
        if path and line.isdigit() and settings:
            files.setdefault(path, {})[int(line)] = settings
    return "".join(_of_file(path, lines) for path, lines in files.items())


def _of_file(path: str, lines: Mapping[int, JsonObject]) -> str:
    try:
        old = Path(path).read_bytes()
        new = old
        for line in sorted(lines, reverse=True):  # bottom up, so that earlier line numbers stay valid
            new = edited(new, line, lines[line])
        new = _importing(new)
        before, after = _lines(old.decode()), _lines(new.decode())
    except (OSError, ValueError, SyntaxError):
        return ""
    shown = path.lstrip("/")
    if not shown.isprintable():
        return ""  # git and patch would need such a name quoted, each in its own way
    end = "\t" if " " in shown else ""  # as git does: otherwise patch ends the name at the space
    return "".join(
        text if text.endswith("\n") else f"{text}\n\\ No newline at end of file\n"
        for text in difflib.unified_diff(before, after, f"a/{shown}{end}", f"b/{shown}{end}", n=1)
    )


def _lines(text: str) -> list[str]:
    """Splits text into lines, keeping line ends. ``str.splitlines`` would also split at form feeds and the like."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])


def edited(source: bytes, line: int, settings: JsonObject) -> bytes:
    """Returns the source with these settings in the ``...DataLoader`` call that spans ``line`` (from 1). Returns it
    unchanged if there is not exactly one such call, or if its arguments are unclear. Raises SyntaxError.

    Example:
        >>> edited(b"x = DataLoader(d, num_workers=0)", 1, {"num_workers": 2, "pin_memory": False}).decode()
        'x = DataLoader(d, num_workers=2, pin_memory=False)'
    """
    tree = ast.parse(source)
    call = _call(tree, line)
    if call is None:
        return source
    starts = [0, *itertools.accumulate(len(text) + 1 for text in source.split(b"\n"))]

    def span(node: ast.expr) -> tuple[int, int]:
        last, column = node.end_lineno or 1, node.end_col_offset or 0  # neither is None in a parsed tree
        return starts[node.lineno - 1] + node.col_offset, starts[last - 1] + column

    own = {k.arg: k.value for k in call.keywords}
    edits: list[tuple[int, int, bytes]] = []
    end = max(span(node)[1] for node in (*call.args, *own.values()))
    for name, value in settings.items():
        if name in (STAGED, ENGINE):
            continue
        if name in own:
            edits.append((*span(own[name]), repr(value).encode()))
        else:
            edits.append((end, end, f", {name}={value!r}".encode()))
    data = own.get("dataset") or next(iter(call.args), None)
    if settings.get(STAGED) and data is not None:  # added last: of two edits at one offset, the later one comes first
        edits += [(at, at, text) for at, text in zip(span(data), (STAGES, b")"), strict=True)]
    if settings.get(ENGINE) and _torchs(tree, call.func):
        edits.append((*span(call.func), b"stoker.DataLoader"))
    out = source
    for first, last, text in sorted(edits, key=lambda e: e[:2], reverse=True):
        out = out[:first] + text + out[last:]
    ast.parse(out)
    return out


def _importing(source: bytes) -> bytes:
    """Adds ``import stoker`` after the first block of imports, if the source needs it."""
    tree = ast.parse(source)
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "stoker"]
    imports = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    known = any(isinstance(n, ast.Import) and any((a.asname or a.name) == "stoker" for a in n.names) for n in imports)
    if not names or known or not imports:
        return source
    *_, last = itertools.takewhile(imports.__contains__, tree.body[tree.body.index(imports[0]) :])
    lines = source.split(b"\n")
    lines.insert(last.end_lineno or last.lineno, b"import stoker" + b"\r" * lines[0].endswith(b"\r"))
    return b"\n".join(lines)


def _torchs(tree: ast.AST, func: ast.expr) -> bool:
    """Returns whether this names torch's own ``DataLoader``, judging by the imports."""
    if isinstance(func, ast.Attribute):
        return func.attr == "DataLoader" and ast.unparse(func.value) in MODULES
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module in MODULES[:1]]
    return any((a.asname or a.name) == getattr(func, "id", "") == "DataLoader" for n in froms for a in n.names)


def _call(tree: ast.AST, line: int) -> ast.Call | None:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name.endswith("DataLoader"):
            found.append(node)
    if len(found) != 1:
        return None
    call = found[0]
    unclear = any(k.arg is None for k in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args)
    return None if unclear or len(call.args) > POSITIONAL or not (call.args or call.keywords) else call
