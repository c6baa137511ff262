"""Rewrites the calls of a function: either each is reported, or some are answered from memory.

Unlike a cut, this covers calls in loops, comprehensions and branches. A *site* is a call or a subscript (a call of
``__getitem__``), identified by its number among all sites of the function, in the order of the syntax tree.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from . import syntax
from .source import NoSource, compiled_like, constant, helper_call, tree_of

SCOPES = (ast.Lambda, *syntax.COMPREHENSIONS)
INLINE = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)  # must run in the function's own frame
# What ``rewritten`` turns a call into. KEEP: ``_stoker.keep(number, lambda: call, values)``, with the local variables
# that it mentions. KEEP_CALL: ``_stoker.keep_call(number, f, ...)``. ENTER: ``_stoker.enter(number, f, ...)``, if the
# called function is itself rewritten. KEEP_PREFIX: ``_stoker.keep_prefix(number, f, lambda: (args, kwargs), values)``.
KEEP, KEEP_CALL, KEEP_PREFIX, ENTER = "keep", "keep_call", "keep_prefix", "enter"


class Site(NamedTuple):
    """A call or subscript in the source of a function."""

    around: set[int]  # numbers of the enclosing sites
    text: str  # its source
    function: str  # source of the callee: "self.load"; "self.rows.__getitem__" for a subscript
    line: int  # its line
    mentioned: list[str] | None  # local variables that it reads, without ``self``; None if it binds some of its own


def rewritten(fn: types.FunctionType, is_method: bool, methods: Mapping[int, str] | None = None) -> types.FunctionType:
    """Returns a copy in which some sites are replaced. ``methods``: how, by number; see ``KEEP``.

    None: all are reported. Each call is ``_stoker.visit(number, lambda: _stoker.call(number, f, ...), values)``, and
    each subscript ``_stoker.item(number, x, index, values)``. ``values`` returns the values of the local variables that
    the site mentions, without ``self``; it is None if the site has variables of its own. A call that must run in the
    function's frame is not visited. Raises NoSource for a function without source, a generator or a coroutine."""
    function = tree_of(fn)
    tree = arguments_before_calls(function.tree)
    if syntax.is_generator(tree):
        raise NoSource(f"{tree.name} is a generator or a coroutine")
    rewriter = _Rewriter(_numbers(tree), _variables(fn, tree, is_method), methods)
    tree.body = [rewriter.visit(statement) for statement in tree.body]
    (made,) = compiled_like(fn, function, [(tree, True)])
    return made


def sites_of(fn: types.FunctionType, is_method: bool) -> dict[int, Site]:
    tree = arguments_before_calls(tree_of(fn).tree)
    numbers = _numbers(tree)
    variables = _variables(fn, tree, is_method)
    out: dict[int, Site] = {}

    def collect(node: ast.AST, around: set[int]) -> None:
        number = numbers.get(id(node))
        if number is not None and isinstance(node, (ast.Call, ast.Subscript)):
            called = ast.unparse(_function_of(node))
            mentioned = _mentioned(node, variables)
            out[number] = Site(around, ast.unparse(node), called, node.lineno, mentioned)
            around = around | {number}
        for child in ast.iter_child_nodes(node):
            collect(child, around)

    collect(tree, set())
    return out


def _numbers(tree: ast.AST) -> dict[int, int]:
    """Numbers of sites, by the ids of their nodes."""
    nodes = (x for x in ast.walk(tree) if isinstance(x, ast.Call) or syntax.is_item(x))
    return {id(x): n for n, x in enumerate(nodes)}


def _reads_frame(x: ast.AST) -> bool:
    return isinstance(x, ast.Name) and x.id in syntax.FRAME_READERS


def _variables(fn: types.FunctionType, tree: ast.FunctionDef, is_method: bool) -> set[str]:
    """All variables of a function and of its comprehensions and lambdas, without ``self``."""
    found = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    found |= {x.arg for x in ast.walk(tree) if isinstance(x, ast.arg)} | set(fn.__code__.co_freevars)
    return found - {syntax.first_param(tree, is_method), "__class__"}


def _mentioned(node: ast.AST, variables: set[str]) -> list[str] | None:
    """Local variables that a site reads; None if it binds variables of its own."""
    if any(isinstance(x, SCOPES) for x in ast.walk(node)):
        return None
    return sorted({x.id for x in ast.walk(node) if isinstance(x, ast.Name) and x.id in variables})


class _Rewriter(ast.NodeTransformer):
    """Replaces sites."""

    def __init__(self, numbers: dict[int, int], variables: set[str], methods: Mapping[int, str] | None) -> None:
        self._numbers = numbers  # of the sites, by node id
        self._variables = variables
        self._methods = methods  # see ``KEEP``; None: report all sites

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return self._site(node) if syntax.is_item(node) else self.generic_visit(node)

    def _site(self, node: ast.Call | ast.Subscript) -> ast.AST:
        number = self._numbers[id(node)]
        method = "visit" if self._methods is None else self._methods.get(number)
        names = _mentioned(node, self._variables)
        needs_frame = any(isinstance(x, INLINE) or _reads_frame(x) for x in ast.walk(node))  # not that of a lambda
        is_frame_reader = isinstance(node, ast.Call) and _reads_frame(node.func)
        self.generic_visit(node)
        if method is None or is_frame_reader or (method in (KEEP, KEEP_PREFIX) and (needs_frame or names is None)):
            return node
        values = constant(None)
        if names is not None:
            values = _thunk(ast.Tuple([ast.Name(n, ast.Load()) for n in names], ast.Load()))  # some may be unbound
        made: ast.expr
        if method in (KEEP_CALL, ENTER):
            made = _helped(method, number, node)
        elif method == KEEP:
            made = helper_call(KEEP, constant(number), _thunk(node), values)
        elif method == KEEP_PREFIX:
            assert isinstance(node, ast.Call)
            called = helper_call("arguments", *node.args)
            called.keywords = node.keywords
            made = helper_call(KEEP_PREFIX, constant(number), node.func, _thunk(called), values)
        elif isinstance(node, ast.Subscript):
            made = helper_call("item", constant(number), node.value, node.slice, values)
        else:
            made = ast.copy_location(_helped("call", number, node), node)
            if not needs_frame:
                made = helper_call("visit", constant(number), _thunk(made), values)
        return ast.copy_location(made, node)

    visit_Call = _site

    def _leave(self, node: ast.AST) -> ast.AST:
        return node  # a nested function's calls are its own

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _leave


def _function_of(node: ast.Call | ast.Subscript) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else ast.Attribute(node.value, "__getitem__", ast.Load())


def _thunk(body: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]), body)


def _helped(method: str, number: int, node: ast.Call | ast.Subscript) -> ast.Call:
    """``_stoker.method(number, f, ...)`` for a call or subscript."""
    if isinstance(node, ast.Subscript):
        return helper_call(method, constant(number), _function_of(node), node.slice)
    out = helper_call(method, constant(number), node.func, *node.args)
    out.keywords = node.keywords
    return out


# -- arguments as variables

_OTHERS = syntax.FRAME_READERS - {"super"}  # these would see the new variables
# nodes that evaluate all their operands, in order
_IN_ORDER = (ast.Call, ast.Attribute, ast.Subscript, ast.BinOp, ast.Tuple, ast.List, ast.Dict)
DRAWING = {"random", "randint", "randrange", "choice", "choices", "sample", "uniform", "integers", "rand", "randn"}
DRAWING |= {"permutation", "randperm", "multinomial", "normal", "gauss", "normalvariate", "random_sample", "item"}


def arguments_before_calls(tree: ast.FunctionDef) -> ast.FunctionDef:
    """Copies a function, and assigns randomly drawn arguments, and parts of records, to variables before the statements
    that use them, so that calls can be identified by values::

        row = random.choice(self.rows)                                    row = random.choice(self.rows)
        image = Image.open(row["path"]).convert("L")                      part = row["path"]
                                                                          image = Image.open(part).convert("L")

        image = Image.open(self.files[random.randrange(9)]).convert("L")  _drawn_1 = self.files[random.randrange(9)]
                                                                          image = Image.open(_drawn_1).convert("L")
    """
    tree = copy.deepcopy(tree)
    if not any(isinstance(x, (ast.Global, ast.Nonlocal)) or getattr(x, "id", "") in _OTHERS for x in ast.walk(tree)):
        tree.body = _with_arguments(tree.body, (syntax.names_bound(tree.body) | set(syntax.params_of(tree))) - {"self"})
    return tree


def _with_arguments(statements: list[ast.stmt], records: set[str]) -> list[ast.stmt]:
    out: list[ast.stmt] = []
    for statement in statements:
        if not isinstance(statement, syntax.FUNCTIONS):
            for holder in (statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
                for name in ("body", "orelse", "finalbody"):
                    if isinstance(getattr(holder, name, None), list):
                        setattr(holder, name, _with_arguments(getattr(holder, name), records))
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
            is_drawn = not syntax.is_chain(child) and _is_drawn(child)
            if is_argument and (is_drawn or _is_part(child, records)):
                # neither can clash with a name in the source
                name = f"_drawn_{statement.lineno}" if is_drawn else ast.unparse(child)
                syntax.put(holder, place, ast.copy_location(ast.Name(name, ast.Load()), child))
                out.append(_assignment(name, child, statement))
                if is_drawn:
                    return out
            elif not syntax.is_chain(child):
                node = child
                break
    return out


def _operands(node: ast.AST) -> Iterator[tuple[object, int | str, ast.expr]]:
    for holder, place, child in syntax.operand_places(node):
        if isinstance(child, ast.keyword):
            yield child, "value", child.value
        elif isinstance(child, ast.expr):
            yield holder, place, child


def _is_part(node: ast.expr, records: Collection[str]) -> bool:
    """Whether it is an item or attribute of a local variable, possibly nested."""
    root, looks = node, False
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        looks |= isinstance(root, ast.Attribute) and root.attr in syntax.LOOKS
        root = root.value
    is_record = root is not node and isinstance(root, ast.Name) and root.id in records
    return is_record and syntax.is_chain(node) and not looks


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
