"""Makes functions of blocks that compute one variable, so that they are calls like others.

::

    with Image.open(path) as file:           def _with_line_1(path):
        image = file.convert("L")                with Image.open(path) as file:
                                                     image = file.convert("L")
                                                 return image
                                             image = _with_line_1(path)

    if image.mode != "RGB":                  def _if_line_3(image):
        image = image.convert("RGB")             if image.mode != "RGB":
                                                     image = image.convert("RGB")
                                                 return image
                                             image = _if_line_3(image)
"""

from __future__ import annotations

import ast
import copy
from collections import Counter

from .drawn_arguments import arguments_before_calls
from .syntax import FRAME_READERS, FUNCTIONS, names_bound, params_of, read_before_bound

_OWN_FRAME = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, *FUNCTIONS)  # what cannot be moved to a function


def blocks_as_calls(tree: ast.FunctionDef) -> ast.FunctionDef:
    """A copy of a function, in which some blocks that compute one variable are calls of functions. Calls in other
    blocks may be known by small values themselves. So of ``with``, only blocks that use what ``as`` binds are replaced,
    and of ``if``, only those that change the variable that is tested."""
    tree = copy.deepcopy(tree)
    if not any(isinstance(x, (ast.Global, ast.Nonlocal)) or _reads_frame(x) for x in ast.walk(tree)):
        deleted = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Del)}
        rewriter = _Rewriter(names_bound(tree.body) | set(params_of(tree)), deleted, _reads(tree))
        tree.body = rewriter.block(tree.body, set(params_of(tree)) - deleted)
    return tree


class _Rewriter:
    """Replaces blocks."""

    def __init__(self, variables: set[str], deleted: set[str], reads: Counter[str]) -> None:
        self._variables = variables
        self._deleted = deleted  # those that a statement deletes
        self._reads = reads  # how often each is read

    def block(self, statements: list[ast.stmt], bound: set[str]) -> list[ast.stmt]:
        """The statements, with functions for blocks, and drawn arguments of calls in variables. ``bound``: variables
        that are certainly bound before."""
        out: list[ast.stmt] = []
        bound = set(bound)
        for statement in statements:
            if not isinstance(statement, FUNCTIONS):
                inside = bound | names_bound([*getattr(statement, "items", []), *_targets(statement)])
                for holder in (statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
                    for name in ("body", "orelse", "finalbody"):
                        if isinstance(getattr(holder, name, None), list):
                            setattr(holder, name, self.block(getattr(holder, name), inside))
            for x in arguments_before_calls([statement], self._variables - {"self"}):
                out += self._replaced(x, bound)
                if isinstance(x, ast.Assign):
                    bound |= names_bound(x.targets) - self._deleted
                    self._variables |= names_bound(x.targets)
        return out

    def _replaced(self, statement: ast.stmt, bound: set[str]) -> list[ast.stmt]:
        result = ""
        if isinstance(statement, ast.With):
            result, needed = self._of_with(statement), read_before_bound(_flat(statement))
        elif isinstance(statement, ast.If):
            result, needed = _of_if(statement), set(_reads(statement))
        if not result or _has_own_frame(statement):
            return [statement]
        params = sorted((needed & self._variables) | ({result} & bound))  # a context may end before it is assigned
        if not bound.issuperset(params):
            return [statement]
        name = f"_{type(statement).__name__.lower()}_line_{statement.lineno}"
        arguments = ast.arguments([], [ast.arg(x) for x in params], None, [], [], None, [])
        function = ast.FunctionDef(name, arguments, [statement, ast.Return(ast.Name(result, ast.Load()))], [])
        call = ast.Call(ast.Name(name, ast.Load()), [ast.Name(x, ast.Load()) for x in params], [])
        made = (function, ast.Assign([ast.Name(result, ast.Store())], call))
        return [ast.fix_missing_locations(ast.copy_location(x, statement)) for x in made]

    def _of_with(self, block: ast.With) -> str:
        """The one variable of a block that the rest of the function reads; "" where the block stays."""
        names = {x.optional_vars.id for x in block.items if isinstance(x.optional_vars, ast.Name)}
        inside = _reads(block)
        if (
            len(names) != len([x for x in block.items if x.optional_vars is not None])
            or not names.intersection(inside)
            or not all(
                isinstance(x, ast.Assign) and all(isinstance(t, ast.Name) for t in x.targets) for x in block.body
            )
        ):
            return ""
        results = [x for x in names_bound([block]) if self._reads[x] > inside[x]]
        is_new = len(results) == 1 and (results[0] not in names or results[0] in names_bound(block.body))
        return results[0] if is_new else ""


def _targets(statement: ast.stmt) -> list[ast.expr]:
    return [statement.target] if isinstance(statement, ast.For) else []


def _of_if(block: ast.If) -> str:
    """The variable that a block tests and changes; "" where it does anything else."""
    first = block.body[0]
    if len(block.body) > 1 or block.orelse or not isinstance(first, ast.Assign) or len(first.targets) > 1:
        return ""
    target = first.targets[0]
    if not isinstance(target, ast.Name) or target.id not in _reads(block.test) or target.id not in _reads(first.value):
        return ""
    return target.id


def _has_own_frame(block: ast.stmt) -> bool:
    return any(isinstance(x, _OWN_FRAME) or getattr(x, "id", "") == "super" for x in ast.walk(block))


def _reads_frame(x: ast.AST) -> bool:
    return isinstance(x, ast.Name) and x.id in FRAME_READERS - {"super"}


def _flat(block: ast.With) -> list[ast.stmt]:
    nothing = ast.Name("_", ast.Store())
    return [*(ast.Assign([x.optional_vars or nothing], x.context_expr) for x in block.items), *block.body]


def _reads(node: ast.AST) -> Counter[str]:
    return Counter(x.id for x in ast.walk(node) if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Store))
