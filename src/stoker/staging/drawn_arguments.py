"""Assigns randomly drawn arguments, and parts of records, to variables, so that calls can be identified by values.

::

    row = random.choice(self.rows)                                      row = random.choice(self.rows)
    image = Image.open(row["path"]).convert("L")                        part = row["path"]
                                                                        image = Image.open(part).convert("L")

    image = Image.open(self.files[random.randrange(9)]).convert("L")    _drawn_1 = self.files[random.randrange(9)]
                                                                        image = Image.open(_drawn_1).convert("L")
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterator

from .syntax import FRAME_READERS, FUNCTIONS, LOOKS, is_chain, names_bound, operand_places, params_of

_OTHERS = FRAME_READERS - {"super"}  # these would see the new variables
# nodes that evaluate all their operands, in order
_IN_ORDER = (ast.Call, ast.Attribute, ast.Subscript, ast.BinOp, ast.Tuple, ast.List, ast.Dict)
DRAWING = {"random", "randint", "randrange", "choice", "choices", "sample", "uniform", "integers", "rand", "randn"}
DRAWING |= {"permutation", "randperm", "multinomial", "normal", "gauss", "normalvariate", "random_sample", "item"}


def arguments_before_calls(tree: ast.FunctionDef) -> ast.FunctionDef:
    """Copies a function, adding assignments of arguments before some statements."""
    tree = copy.deepcopy(tree)
    if not any(isinstance(x, (ast.Global, ast.Nonlocal)) or getattr(x, "id", "") in _OTHERS for x in ast.walk(tree)):
        tree.body = _block(tree.body, (names_bound(tree.body) | set(params_of(tree))) - {"self"})
    return tree


def _block(statements: list[ast.stmt], records: set[str]) -> list[ast.stmt]:
    out: list[ast.stmt] = []
    for statement in statements:
        if not isinstance(statement, FUNCTIONS):
            for holder in (statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
                for name in ("body", "orelse", "finalbody"):
                    if isinstance(getattr(holder, name, None), list):
                        setattr(holder, name, _block(getattr(holder, name), records))
        if isinstance(statement, (ast.Assign, ast.Return, ast.Expr)) and statement.value is not None:
            out += _hoisted(statement.value, statement, records)
        elif isinstance(statement, ast.With):
            out += _hoisted(statement.items[0].context_expr, statement, records)
        out.append(statement)
    return out


def _hoisted(value: ast.expr, statement: ast.stmt, records: Collection[str]) -> list[ast.stmt]:
    """Assigns arguments to variables, as far as no call precedes them in the statement."""
    out: list[ast.stmt] = []
    node: ast.AST | None = value
    while isinstance(node, _IN_ORDER):
        around, node = node, None
        for holder, place, child in _operands(around):
            is_argument = isinstance(around, ast.Call) and child is not around.func
            is_drawn = not is_chain(child) and _is_drawn(child)
            if is_argument and (is_drawn or _is_part(child, records)):
                # neither can clash with a name in the source
                name = f"_drawn_{statement.lineno}" if is_drawn else ast.unparse(child)
                _put(holder, place, ast.copy_location(ast.Name(name, ast.Load()), child))
                out.append(_assignment(name, child, statement))
                if is_drawn:
                    return out
            elif not is_chain(child):
                node = child
                break
    return out


def _operands(node: ast.AST) -> Iterator[tuple[object, object, ast.expr]]:
    for holder, place, child in operand_places(node):
        if isinstance(child, ast.keyword):
            yield child, "value", child.value
        elif isinstance(child, ast.expr):
            yield holder, place, child


def _is_part(node: ast.expr, records: Collection[str]) -> bool:
    """Whether it is an item or attribute of a local variable, possibly nested."""
    root, looks = node, False
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        looks |= isinstance(root, ast.Attribute) and root.attr in LOOKS
        root = root.value
    return root is not node and isinstance(root, ast.Name) and root.id in records and is_chain(node) and not looks


def _is_drawn(node: ast.expr) -> bool:
    """Whether it is a drawn item, or a call that draws."""
    if isinstance(node, ast.Call):
        return _name_of(node) in DRAWING
    calls = [x for x in ast.walk(node) if isinstance(x, ast.Call)]
    return isinstance(node, ast.Subscript) and any(_name_of(x) in DRAWING for x in calls)


def _name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _assignment(name: str, value: ast.expr, statement: ast.stmt) -> ast.stmt:
    made = ast.Assign([ast.Name(name, ast.Store())], value)
    return ast.fix_missing_locations(ast.copy_location(made, statement))


def _put(holder: object, place: object, node: ast.expr) -> None:
    if isinstance(holder, list) and isinstance(place, int):
        holder[place] = node
    else:
        setattr(holder, str(place), node)
