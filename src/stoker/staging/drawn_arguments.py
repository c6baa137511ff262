"""Gives variables to arguments that are drawn at random, or parts of a record, so that calls are known by their values.

::

    row = random.choice(self.rows)                                      row = random.choice(self.rows)
    image = Image.open(row["path"]).convert("L")                        part = row["path"]
                                                                        image = Image.open(part).convert("L")

    image = Image.open(self.files[random.randrange(9)]).convert("L")    _drawn_1 = self.files[random.randrange(9)]
                                                                        image = Image.open(_drawn_1).convert("L")

    if self.unaligned:                                                  if self.unaligned:
        image = Image.open(self.files[random.randrange(9)])                 _either_3 = self.files[random.randrange(9)]
    else:                                                               else:
        image = Image.open(self.files[index])                               _either_3 = self.files[index]
                                                                        image = Image.open(_either_3)
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from .syntax import LOOKS, is_chain, operand_places

_IN_ORDER = (ast.Call, ast.Attribute, ast.Subscript, ast.BinOp, ast.Tuple, ast.List, ast.Dict)  # all operands run
DRAWING = {"random", "randint", "randrange", "choice", "choices", "sample", "uniform", "integers", "rand", "randn"}
DRAWING |= {"permutation", "randperm", "multinomial", "normal", "gauss", "normalvariate", "random_sample", "item"}


def arguments_before_calls(statements: list[ast.stmt], records: Collection[str]) -> list[ast.stmt]:
    """The statements of a block, which may be changed, with assignments of arguments before some."""
    out: list[ast.stmt] = []
    for statement in statements:
        after: list[ast.stmt] = []
        if isinstance(statement, (ast.Assign, ast.Return, ast.Expr)) and statement.value is not None:
            out += _hoisted(statement.value, statement, records)
        elif isinstance(statement, ast.With):
            out += _hoisted(statement.items[0].context_expr, statement, records)
        elif isinstance(statement, ast.If):
            after = _call_after(statement)
        out += [statement, *after]
    return out


def _hoisted(value: ast.expr, statement: ast.stmt, records: Collection[str]) -> list[ast.stmt]:
    """Assigns arguments to variables, so far as nothing is called before them in the statement."""
    out: list[ast.stmt] = []
    node: ast.AST | None = value
    while isinstance(node, _IN_ORDER):
        around, node = node, None
        for holder, place, child in _operands(around):
            is_argument = isinstance(around, ast.Call) and child is not around.func
            is_drawn = not is_chain(child) and _is_drawn(child)
            if is_argument and (is_drawn or _is_part(child, records)):
                name = f"_drawn_{statement.lineno}" if is_drawn else ast.unparse(child)  # no name in source
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
    """Whether it is an item or attribute of a local variable, or one of these."""
    root, looks = node, False
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        looks |= isinstance(root, ast.Attribute) and root.attr in LOOKS
        root = root.value
    return root is not node and isinstance(root, ast.Name) and root.id in records and is_chain(node) and not looks


def _is_drawn(node: ast.expr) -> bool:
    """Whether it is an item that is drawn, or a call that draws."""
    if isinstance(node, ast.Call):
        return _name_of(node) in DRAWING
    calls = [x for x in ast.walk(node) if isinstance(x, ast.Call)]
    return isinstance(node, ast.Subscript) and any(_name_of(x) in DRAWING for x in calls)


def _name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _call_after(block: ast.If) -> list[ast.stmt]:
    """Takes a call that both branches end with out of them, where it differs in its argument only."""
    if not block.orelse:
        return []
    ends: list[ast.Assign] = []
    calls: list[ast.Call] = []
    for x in (block.body[-1], block.orelse[-1]):
        if not (isinstance(x, ast.Assign) and isinstance(x.value, ast.Call) and len(x.value.args) == 1):
            return []
        ends.append(x)
        calls.append(x.value)
    kinds = {(ast.unparse(call.func), *map(ast.unparse, end.targets)) for call, end in zip(calls, ends, strict=True)}
    if len(kinds) > 1 or any(call.keywords or not is_chain(call.func) for call in calls):
        return []
    if not all(isinstance(end.targets[0], ast.Name) for end in ends) or isinstance(calls[0].args[0], ast.Starred):
        return []
    name = f"_either_{block.lineno}"
    for branch, end, call in zip((block.body, block.orelse), ends, calls, strict=True):
        branch[-1] = _assignment(name, call.args[0], end)
    value = ast.Call(calls[0].func, [ast.Name(name, ast.Load())], [])
    return [ast.fix_missing_locations(ast.copy_location(ast.Assign(ends[0].targets, value), ends[0]))]


def _assignment(name: str, value: ast.expr, statement: ast.stmt) -> ast.stmt:
    made = ast.Assign([ast.Name(name, ast.Store())], value)
    return ast.fix_missing_locations(ast.copy_location(made, statement))


def _put(holder: object, place: object, node: ast.expr) -> None:
    if isinstance(holder, list) and isinstance(place, int):
        holder[place] = node
    else:
        setattr(holder, str(place), node)
