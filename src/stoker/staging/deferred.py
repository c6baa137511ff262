"""Statements that only note something: times, counts, lines of a log. The second part of a function runs them.

::

    began = time.time()                          # deferred
    image = load(self.paths[i])                  # kept
    self.seconds += time.time() - began          # deferred: it measures what loading from memory takes
    self.count += 1                              # deferred: it counts each time
    if not self.is_seeded:                       # deferred: a worker seeds itself before it draws
        info = get_worker_info()
        if info is not None:
            np.random.seed(info.id)
            self.is_seeded = True

They read clocks, the index, attributes of ``self`` and each other, and nothing that stays in the first part reads what
they set.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .syntax import bound_once, is_chain, is_name, names_bound, names_read, params_of

CLOCKS = {"time", "perf_counter", "monotonic", "process_time", "thread_time"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
CLOCKS |= {f"time.{name}" for name in CLOCKS} | {"datetime.now", "datetime.datetime.now"}
GLOBALS = {x.partition(".")[0] for x in CLOCKS}
PLAIN_CALLS = {"len", "round", "float", "int", "max", "min", "str"}
WORKER = "get_worker_info"  # a call that is a look-up
SEEDS = {"seed", "manual_seed", "manual_seed_all"}  # of a module: what comes before the cut draws nothing
NOTES = {"append", "add", "update", "debug", "info", "warning", "log"}  # methods whose results are not used
_VALUES = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Tuple, ast.JoinedStr, ast.FormattedValue)
_WITHOUT_VALUE = (ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context)


def deferred(tree: ast.FunctionDef, head: Sequence[ast.stmt], first: str) -> list[ast.stmt]:
    """Those statements of a function's first part, ``head``, that may run after it. What ``head`` ends with may be no
    part of the function. ``first``: what the function calls ``self``; "" if it has none."""
    params = params_of(tree)
    locals_ = {*params, *names_bound(tree.body)}
    # Those of __getitem__ are indices. Another function's may be written to.
    index = bound_once(tree.body, params) & {*params} if tree.name == "__getitem__" else set()
    tried = (x for y in head for x in ast.walk(y) if isinstance(x, ast.Try))
    if not first or any(_returns(x) for y in tried for x in (*y.body, *y.orelse, *y.finalbody)):
        return []  # where the first part returns, the sample is made as a whole: see ``Unplanned``
    found = [x for x in head if _only_notes(x, locals_ - {*index, first})]
    while True:
        others = [x for x in head if not any(x is y for y in found)]
        read = names_read(others) | {x.attr for y in others for x in ast.walk(y) if isinstance(x, ast.Attribute)}
        known = {*index, first, *names_bound(found)}
        read |= names_bound(others)  # what is bound twice stays in its order
        left = [x for x in found if not _sets(x, first) & read and names_read([x]) & locals_ <= known]
        if len(left) == len(found):
            return found
        found = left


def _returns(statement: ast.stmt) -> bool:
    return any(isinstance(x, ast.Return) and not getattr(x, "packs", False) for x in ast.walk(statement))


def _sets(statement: ast.stmt, first: str) -> set[str]:
    """Variables and attributes of ``self`` that a statement sets, or may write to."""
    out = names_bound([statement])
    for x in ast.walk(statement):
        if isinstance(x, ast.Attribute) and is_name(x.value, first):
            out.add(x.attr)
        elif isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and isinstance(x.func.value, ast.Name):
            out |= {x.func.value.id} if x.func.attr not in SEEDS else set()  # times.append(...), of a global list
    return out - {first} - GLOBALS


def _only_notes(statement: ast.stmt, others: set[str]) -> bool:
    """Whether a statement has the form of one that only notes something. ``others``: locals but ``self`` and index."""
    if isinstance(statement, (ast.Assign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return len(targets) == 1 and _is_value(statement.value) and _is_noted_in(targets[0], statement.value, others)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        is_method = isinstance(call.func, ast.Attribute) and call.func.attr in NOTES | SEEDS and is_chain(call.func)
        is_note = is_name(call.func, "print") or (is_method and not names_read([call.func]) & others)
        return is_note and all(map(_is_value, [*call.args, *_values(call)]))
    if isinstance(statement, ast.If):
        block = [*statement.body, *statement.orelse]
        own = names_bound(x for x in block if isinstance(x, ast.Assign) and _asks_worker(x.value))
        if names_bound(block) != own:
            return False
        return _is_value(statement.test) and all(_only_notes(x, others - own) for x in block)
    return False


def _is_noted_in(target: ast.expr, value: ast.expr, others: set[str]) -> bool:
    """Whether it is a variable that gets a time, or a difference of two; or an attribute of ``self``, or its item."""
    if isinstance(target, ast.Name):
        if _asks_worker(value):
            return True
        is_number = isinstance(value, (ast.Call, ast.BinOp)) and not any(
            isinstance(x, ast.Subscript) for x in ast.walk(value)
        )
        return is_number and names_read([value]) <= others | GLOBALS
    root = target
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        root = root.value
    return isinstance(root, ast.Name) and root.id not in others and is_chain(target)


def _asks_worker(node: ast.AST) -> bool:
    """Whether it is ``torch.utils.data.get_worker_info()``."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == WORKER and is_chain(node.func)


def _values(call: ast.Call) -> list[ast.expr]:
    return [x.value for x in call.keywords]


def _is_value(node: ast.AST) -> bool:
    """Whether an expression has only clocks, look-ups, constants and arithmetic."""
    if isinstance(node, ast.expr) and is_chain(node):
        return True
    if isinstance(node, ast.Call):
        if _asks_worker(node):
            return True
        return ast.unparse(node.func) in CLOCKS | PLAIN_CALLS and all(map(_is_value, [*node.args, *_values(node)]))
    return isinstance(node, _WITHOUT_VALUE) or (
        isinstance(node, _VALUES) and all(map(_is_value, ast.iter_child_nodes(node)))
    )
