"""Queries on a function's syntax tree: what it binds and reads, and which calls it makes in which order."""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple, TypeAlias, TypeVar

from .own_caches import is_stored_in

FRAME_READERS = {"super", "locals", "vars", "dir", "globals", "eval", "exec"}  # depend on the calling frame
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)  # scopes whose statements run later
SIMPLE = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)  # statements inside which a cut may continue
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LOOKS = {"size", "width", "height", "mode", "shape", "ndim", "dtype", "format"}  # reading these changes no object
Position: TypeAlias = tuple[int | str, ...]
SomeNode = TypeVar("SomeNode", bound=ast.AST)


# -- statements


def blocks_of(statement: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The blocks of a statement in which a cut may lie."""
    if isinstance(statement, ast.If):
        yield "body", statement.body
        if statement.orelse:
            yield "orelse", statement.orelse
    elif isinstance(statement, ast.With) or (
        isinstance(statement, ast.Try) and not statement.orelse and not statement.finalbody
    ):
        yield "body", statement.body


def root_of(statement: ast.stmt) -> ast.expr | None:
    """The expression of a simple statement, inside which a cut may continue."""
    if not isinstance(statement, SIMPLE) or any(isinstance(x, ast.NamedExpr) for x in ast.walk(statement)):
        return None  # operands hoisted out of order could see what := binds
    return statement.value


def changes_state(statement: ast.stmt, locals_: set[str], scope: Mapping[str, object] | None = None) -> str:
    """What a statement itself assigns to that outlives the call, such as ``self.count``; "" if nothing. ``locals_``:
    local variables that are not parameters. ``scope``: values of names; items of ``own_caches`` do not count."""
    for x in ast.walk(statement):
        if isinstance(x, (ast.Global, ast.Nonlocal)):
            return ", ".join(x.names)
        if not isinstance(x, (ast.Attribute, ast.Subscript)) or isinstance(x.ctx, ast.Load):
            continue
        if _variable_of(x) not in locals_ and not is_stored_in(x, scope or {}):
            return ast.unparse(x)
    return ""


def sets_something(statement: ast.stmt, locals_: set[str]) -> str:
    """A call made for its side effect, not on a local variable: ``warnings.simplefilter()``; "" if none."""
    for x in ast.walk(statement):
        if isinstance(x, ast.Expr) and isinstance(x.value, ast.Call) and _variable_of(x.value.func) not in locals_:
            return ast.unparse(x.value)
    return ""


def _variable_of(node: ast.expr) -> str:
    """``x`` for ``x.a[i].b``; "" if it is not a part of a variable."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_setup(statement: ast.stmt, first: str) -> bool:
    """Whether a statement is ``if self.file is None: self.file = ...``, which opens something on first use. Both parts
    run it. ``first``: the function's name for ``self``; "" if it has none."""
    if not isinstance(statement, ast.If) or statement.orelse or not first:
        return False
    assigned = set()
    for x in statement.body:
        target = x.targets[0] if isinstance(x, ast.Assign) and len(x.targets) == 1 else None
        if not (isinstance(target, ast.Attribute) and is_name(target.value, first)):
            return False
        assigned.add(target.attr)
    tested = {x.attr for x in ast.walk(statement.test) if isinstance(x, ast.Attribute) and is_name(x.value, first)}
    tested |= {x.value for x in ast.walk(statement.test) if isinstance(x, ast.Constant) and isinstance(x.value, str)}
    return bool(assigned & tested)


def attributes_assigned(tree: ast.FunctionDef, first: str) -> set[str]:
    """Attributes of its own object, and global variables, that a method assigns to in any branch.

    Excludes ``is_setup`` and assignments to items: ``self.images[i] = image`` is how datasets cache what they loaded.
    Includes augmented assignments to items (``self.counts[i] += 1``), also by another name (``n = self.counts``)."""
    out: set[str] = set()
    nodes = list(_without_setup(tree, first))
    other_names = _held_by_locals(nodes, first)
    for node in nodes:
        if isinstance(node, ast.Global):
            out.update(node.names)
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and is_name(node.value, first):
            out.add(node.attr)
        elif isinstance(node, ast.AugAssign):
            whole = _without_items(node.target)
            if isinstance(whole, ast.Attribute) and is_name(whole.value, first):
                out.add(whole.attr)
            elif isinstance(whole, ast.Name) and whole is not node.target:
                out |= other_names.get(whole.id, set())
    return out


def _without_setup(tree: ast.FunctionDef, first: str) -> Iterator[ast.AST]:
    """Yields the nodes of a function, except those of ``is_setup``."""
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if not (isinstance(node, ast.stmt) and is_setup(node, first)):
            yield node
            waiting += ast.iter_child_nodes(node)


def _held_by_locals(nodes: Iterable[ast.AST], first: str | None = None) -> dict[str, set[str]]:
    """By local variable: the attributes that it may be, or be part of. ``first``: those of this variable only."""
    out: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(whole := _without_items(node.value), ast.Attribute):
            for target in node.targets if first is None or is_name(whole.value, first) else ():
                if isinstance(target, ast.Name):
                    out.setdefault(target.id, set()).add(whole.attr)
    return out


MUTATORS = {"append", "appendleft", "add", "update", "extend", "insert", "pop", "popleft", "popitem", "remove"}
MUTATORS |= {"discard", "clear", "setdefault", "sort", "reverse", "write", "writelines"}
MUTATORS |= {"fill", "move_to_end", "difference_update", "intersection_update", "symmetric_difference_update"}
# functions that change their first argument: of random and numpy, bisect, heapq and operator
CHANGE_ARGUMENT = {"shuffle", "copyto", "put", "place", "putmask", "fill_diagonal", "put_along_axis", "setitem"}
CHANGE_ARGUMENT |= {"insort", "insort_left", "insort_right"}
CHANGE_ARGUMENT |= {"heappush", "heappop", "heapify", "heapreplace", "heappushpop"}
IN_PLACE = re.compile(r"[a-z]\w*[a-z0-9]_")  # tensor methods such as ``mul_``


ANY_NAME = "*"  # an attribute with a computed name is written


class NamesWritten(NamedTuple):
    """Names that a function modifies in any branch: assigns to, or to one of their items, or through a container's
    mutating method. Excludes values held only by local variables, and ``is_setup``."""

    names: Set[str] = frozenset()  # attributes, and global variables that it assigns to
    variables: Set[str] = frozenset()  # global variables with a method that it calls: ``np.sort(x)``
    through_locals: Set[str] = frozenset()  # those that it modifies through a local variable
    arguments: Set[str] = frozenset()  # parameters whose values it modifies


def names_written(tree: ast.FunctionDef, first: str) -> NamesWritten:
    """What a function modifies. ``first``: its name for ``self``; "" if it has none."""
    found = _Written(tree, first)
    return NamesWritten(found.names, found.variables, found.through_locals, found.arguments)


class _Written(ast.NodeVisitor):
    def __init__(self, tree: ast.FunctionDef, first: str) -> None:
        self.names: set[str] = set()
        self.variables: set[str] = set()
        self.through_locals: set[str] = set()
        self._first = first
        self._locals = local_variables(tree)
        self._arguments = set(params_of(tree)) - {first}
        self._rebound = names_bound(tree.body)
        self.arguments: set[str] = set()
        self._attributes = _held_by_locals(ast.walk(tree))
        for statement in tree.body:
            self.visit(statement)

    def _changes(self, holder: ast.expr, name: str = "") -> None:
        """Records that a value changes. ``name``: the assigned attribute."""
        whole, variable = _without_items(holder), _variable_of(holder)
        if variable in self._arguments:
            self.arguments |= {variable} - self._rebound
            return  # usually a value of the current sample
        of_local = variable if variable in self._locals else ""
        if of_local and of_local not in self._attributes:
            return
        if name:
            self.names.add(name)
        elif (isinstance(whole, ast.Attribute) and whole.attr == "__dict__") or (
            isinstance(whole, ast.Call) and is_name(whole.func, "vars")
        ):
            self.names.add(ANY_NAME)
        elif isinstance(whole, ast.Attribute):
            self.names.add(whole.attr)
        elif isinstance(whole, ast.Name):
            if of_local:
                self.names |= self._attributes[of_local]
            else:
                self.variables.add(whole.id)
                self.arguments |= {whole.id} & {self._first} - self._rebound  # of a plain function
            self.through_locals |= self._attributes[of_local] if of_local else set()

    def visit_If(self, node: ast.If) -> None:
        if not is_setup(node, self._first):
            self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> None:
        self.names.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.names.update(node.names)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._changes(node.value, node.attr)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._changes(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr") and len(node.args) > 1:
            name = node.args[1]
            is_known = isinstance(name, ast.Constant) and isinstance(name.value, str)
            self.names.add(name.value if is_known else ANY_NAME)  # type: ignore[attr-defined]
        if isinstance(node.func, ast.Attribute) and (node.func.attr in MUTATORS or IN_PLACE.fullmatch(node.func.attr)):
            self._changes(node.func.value)
        called = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        for changed in (
            *(node.args[:1] if called in CHANGE_ARGUMENT else ()),
            *(keyword.value for keyword in node.keywords if keyword.arg in ("out", "dst")),
        ):
            for part in changed.elts if isinstance(changed, ast.Tuple) else (changed,):
                self._changes(part)
        self.generic_visit(node)


def _without_items(node: ast.expr) -> ast.expr:
    """``self.boxes`` for ``self.boxes[i][0]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def is_reset(statement: ast.stmt, first: str) -> bool:
    """Whether a statement is like ``self.errors = 0``, which the second part runs. ``first``: as for ``is_setup``."""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant) and first):
        return False
    return all(isinstance(t, ast.Attribute) and is_name(t.value, first) for t in statement.targets)


def is_generator(tree: ast.FunctionDef) -> bool:
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
            return True
        if not isinstance(node, FUNCTIONS):
            waiting += ast.iter_child_nodes(node)
    return False


# -- expressions


def calls_in(node: ast.AST | None) -> Iterator[ast.Call | ast.Subscript]:
    """Calls and subscripts in order of evaluation, except those evaluated conditionally or repeatedly."""
    unsafe = (ast.Lambda, *COMPREHENSIONS, ast.NamedExpr, ast.Await, ast.Yield)
    if node is None or isinstance(node, unsafe):
        return
    always: Iterable[ast.AST] = operands(node)
    if isinstance(node, ast.BoolOp):
        always = node.values[:1]
    elif isinstance(node, ast.IfExp):
        always = [node.test]
    elif isinstance(node, ast.Compare) and len(node.ops) > 1:
        always = [node.left]
    for child in always:
        yield from calls_in(child)
    if isinstance(node, ast.Call):
        if not (isinstance(node.func, ast.Name) and node.func.id in FRAME_READERS):
            yield node
    elif isinstance(node, ast.Subscript) and is_item(node):
        yield node


def is_item(node: ast.AST) -> bool:
    """Whether a node reads an item, ``x[i]``, without slices."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
        return False
    return not any(isinstance(x, ast.Slice) for x in ast.walk(node.slice))


def calls_and_lists(node: ast.AST | None) -> Iterator[ast.Call | ast.ListComp]:
    """Calls and list comprehensions of an expression, in order of evaluation, without those inside a comprehension."""
    if isinstance(node, ast.ListComp):
        yield node
    elif node is not None:
        for child in operands(node):
            yield from calls_and_lists(child)
        if isinstance(node, ast.Call):
            yield node


def operands(node: ast.AST) -> list[ast.AST]:
    """The operands of a node, in order of evaluation."""
    return [child for _, _, child in operand_places(node)]


def operand_places(node: ast.AST) -> list[tuple[object, int | str, ast.AST]]:
    """The operands of a node in order of evaluation, each with the list or node that holds it and its place there."""
    found: list[tuple[object, int | str, ast.AST]] = []
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            found += [(value, k, x) for k, x in enumerate(value) if isinstance(x, ast.AST)]
        elif isinstance(value, ast.AST) and not isinstance(value, (ast.expr_context, ast.operator, ast.unaryop)):
            found.append((node, name, value))
    if isinstance(node, ast.Dict):  # a key, its value, the next key
        found.sort(key=lambda place: int(place[1]))
    return found


def put(holder: object, place: int | str, node: ast.AST) -> None:
    """Puts a node at a place from ``operand_places``."""
    if isinstance(place, str):
        setattr(holder, place, node)
    elif isinstance(holder, list):
        holder[place] = node


def shallow_copy(node: SomeNode) -> SomeNode:
    """Copies a node and its lists, but not its children."""
    new = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            setattr(new, name, list(value))
    return new


def is_chain(node: ast.AST, plain: frozenset[tuple[int, int]] | None = None) -> bool:
    """Whether a node is a name with attributes and items (``self.rows[index]``), a constant, or a tuple of these, so
    that nothing is called. ``plain``: line and column of allowed subscripts; None: any."""
    if isinstance(node, (ast.Name, ast.Constant)):
        return True
    if isinstance(node, ast.Attribute):
        is_super = isinstance(node.value, ast.Call) and is_name(node.value.func, "super") and not node.value.args
        return is_super or is_chain(node.value, plain)
    if isinstance(node, ast.Subscript):
        known = plain is None or (node.lineno, node.col_offset) in plain
        return known and is_chain(node.value, plain) and is_chain(node.slice, plain)
    return isinstance(node, (ast.Tuple, ast.List)) and all(is_chain(x, plain) for x in node.elts)


def is_name(node: ast.AST, name: str) -> bool:
    """Whether an expression is a variable of this name."""
    return isinstance(node, ast.Name) and node.id == name


# -- variables


def params_of(tree: ast.FunctionDef) -> list[str]:
    """Names of all parameters, in the order of a code object's variables."""
    a = tree.args
    named = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return [*named, *(x.arg for x in (a.vararg, a.kwarg) if x is not None)]


def first_param(tree: ast.FunctionDef, is_method: bool) -> str:
    """A method's name for ``self``; "" for a function."""
    named = [*tree.args.posonlyargs, *tree.args.args]
    return named[0].arg if is_method and named else ""


def names_read(nodes: Iterable[ast.AST]) -> set[str]:
    """Variables read or deleted in nodes, including nested functions."""
    found = set()
    for x in (x for node in nodes for x in ast.walk(node)):
        if isinstance(x, ast.Name) and isinstance(x.ctx, (ast.Load, ast.Del)):
            found.add(x.id)
        elif isinstance(x, ast.AugAssign) and isinstance(x.target, ast.Name):
            found.add(x.target.id)
    return found


def names_bound(nodes: Iterable[ast.AST]) -> set[str]:
    """Variables that nodes bind in their own scope."""
    return {name for node in nodes for x in _in_scope(node) for name in _bound_by(x)}


def _bound_by(x: ast.AST) -> list[str]:
    """Variables that a node itself binds."""
    if isinstance(x, ast.Name):
        return [x.id] if isinstance(x.ctx, ast.Store) else []
    if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [x.name]
    if isinstance(x, ast.alias):
        return [(x.asname or x.name).split(".")[0]]
    if isinstance(x, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and x.name:
        return [x.name]
    return []


def _in_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a scope, without nested functions and classes, and of comprehensions only the ``:=``."""
    yield node
    if isinstance(node, COMPREHENSIONS):
        yield from (x.target for x in ast.walk(node) if isinstance(x, ast.NamedExpr))
    elif not isinstance(node, FUNCTIONS):
        for child in ast.iter_child_nodes(node):
            yield from _in_scope(child)


def local_variables(tree: ast.FunctionDef) -> set[str]:
    """Local variables of a function that are not parameters."""
    return names_bound(tree.body) - set(params_of(tree))


def read_before_bound(block: list[ast.stmt]) -> set[str]:
    """Variables that a block may read before it binds them."""
    bound: set[str] = set()
    needed: set[str] = set()
    for statement in block:
        if isinstance(statement, ast.With):
            for item in statement.items:
                needed |= names_read([item.context_expr]) - bound
                bound |= names_bound([item.optional_vars] if item.optional_vars else [])
            needed |= read_before_bound(statement.body) - bound
            continue
        needed |= names_read([statement]) - bound
        if isinstance(statement, ast.Assign):
            bound |= names_bound(statement.targets)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            bound |= names_bound([statement.target])
    return needed


def bound_once(body: list[ast.stmt], params: list[str]) -> set[str]:
    """Variables bound or deleted by exactly one statement, here or in a nested function; parameters bound by none."""
    counts = Counter(params)
    for x in (x for statement in body for x in ast.walk(statement)):
        counts.update([x.id] if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Del) else _bound_by(x))
    return {name for name, n in counts.items() if n == 1}
