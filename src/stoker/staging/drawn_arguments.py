"""Gives an argument that is drawn at random a variable, so that the call is known by its value.

::

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

from .syntax import is_chain, operand_places

DRAWING = {"random", "randint", "randrange", "choice", "choices", "sample", "uniform", "integers", "rand", "randn"}
DRAWING |= {"permutation", "randperm", "multinomial", "normal", "gauss", "normalvariate", "random_sample", "item"}


def arguments_before_calls(statements: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a block, which may be changed, with assignments of drawn arguments before some."""
    out: list[ast.stmt] = []
    for statement in statements:
        after: list[ast.stmt] = []
        if isinstance(statement, (ast.Assign, ast.Return, ast.Expr)) and statement.value is not None:
            out += _hoisted(statement.value, statement)
        elif isinstance(statement, ast.If):
            after = _call_after(statement)
        out += [statement, *after]
    return out


def _hoisted(value: ast.expr, statement: ast.stmt) -> list[ast.stmt]:
    """Assigns the first argument that is drawn to a variable, if nothing is called before that in the statement."""
    node: ast.AST | None = value
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript, ast.keyword)):
        places = [x for x in operand_places(node) if not is_chain(x[2])]
        holder, place, child = places[0] if places else (None, None, None)
        is_argument = isinstance(node, ast.keyword) or (isinstance(node, ast.Call) and child is not node.func)
        if is_argument and isinstance(child, ast.expr) and _is_drawn(child):
            name = f"_drawn_{statement.lineno}"
            _put(holder, place, ast.copy_location(ast.Name(name, ast.Load()), child))
            return [_assignment(name, child, statement)]
        node = child
    return []


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
