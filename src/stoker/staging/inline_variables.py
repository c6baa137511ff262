"""Puts what local variables were assigned in the place of these variables, so that a call is known by small values.

::

    image = Image.open(path)                 # only used below: not run when the call is answered from memory
    image = image.convert("RGB")             # Image.open(path).convert("RGB"), known by path
    if self.transform is not None:
        image = self.transform(image)        # self.transform(Image.open(path).convert("RGB")), known by path

A *definition* is an assignment of a call to one variable. A call may stand for a variable where that assignment is the
only one that reaches the use, and this is the first use of the object: nothing can have written into it before. Nothing
is taken across loops, ``with`` and ``try``, or across assignments to attributes and items.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .syntax import COMPREHENSIONS, FUNCTIONS, LOOKS, names_bound, names_read, operands, params_of

_FRAME = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)  # a call with one of these runs in its own frame only
_SCOPES = (*FUNCTIONS, *COMPREHENSIONS)


class Use(NamedTuple):
    """A use of a variable."""

    calls: frozenset[int]  # numbers of the calls around it that the definition may be taken into
    is_last: bool  # the same statement assigns the variable anew


@dataclass
class Definition:
    """An assignment of a call to a variable."""

    name: str  # of the variable
    mentions: set[str]  # other variables that the call mentions, and those of definitions that may be taken into it
    mentions_itself: bool  # the call mentions the variable that it is assigned to
    uses: list[Use] = field(default_factory=list)  # those that certainly see it, in order
    usable: bool = True  # nothing can have written to the object, or changed what the call reads, so far
    is_lost: bool = False  # uses that cannot be told from those of other assignments may see it, too


Reaching = dict[str, tuple[int, Definition]]  # by variable: the number of the call that it was assigned


class Definitions:
    """The definitions of a function."""

    def __init__(self, tree: ast.FunctionDef, numbers: Mapping[int, int]) -> None:
        # by number of a call: the variables in it that a definition may be taken for, each with its call's number
        self.given: dict[int, dict[str, int]] = {}
        self.by_number: dict[int, Definition] = {}  # the definitions, by the numbers of their calls
        self._numbers = numbers  # of its calls, by the ids of their nodes
        self._nodes = {numbers[id(x)]: x for x in ast.walk(tree) if id(x) in numbers}
        self._statements: dict[int, ast.stmt] = {}
        self._certain: Counter[str] = Counter()  # uses of which the definition is known, by variable
        self._blocked: set[tuple[int, str]] = set()
        self._bound: set[str] = set()  # by the statement that is looked at
        reads = [x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Store)]
        reads += [
            x.target.id for x in ast.walk(tree) if isinstance(x, ast.AugAssign) and isinstance(x.target, ast.Name)
        ]
        self._reads = Counter(reads)
        scopes = [x for x in ast.walk(tree) if isinstance(x, FUNCTIONS) and x is not tree]
        self._captured = {name for x in scopes for name in _free(x)}  # by functions that may run at any time
        if not any(isinstance(x, (ast.Global, ast.Nonlocal, ast.NamedExpr)) for x in ast.walk(tree)):
            self._block(tree.body, {})
        for number, name in self._blocked:
            self.given.get(number, {}).pop(name, None)

    def inlined(self, number: int, definitions: Collection[int]) -> ast.expr:
        """A copy of a call, with these definitions in the place of their variables."""
        given = {name: d for name, d in self.given.get(number, {}).items() if d in definitions}
        replaced = {name: self.inlined(d, definitions) for name, d in given.items()}
        out = _Replace(replaced).visit(copy.deepcopy(self._nodes[number]))
        assert isinstance(out, ast.expr)
        return out

    def superfluous(self, kept: Mapping[int, Collection[int]]) -> set[int]:
        """Definitions that are used by nothing else than kept calls into which they are taken. ``kept``: by number
        of a kept call, the definitions that are taken into it."""
        out: set[int] = set()
        for number in sorted(self.by_number, key=self._place_of, reverse=True):
            found = self.by_number[number]
            if found.is_lost and self._certain[found.name] != self._reads[found.name]:
                continue
            if found.uses and all(
                any(number in kept.get(call, ()) or call in out for call in use.calls) for use in found.uses
            ):
                out.add(number)
        return out

    def may_write(self, call: int, taken: Collection[int], dropped: Collection[int]) -> bool:
        """Whether a call may write to an object that is used after it, too: then it must be made. ``taken``:
        definitions that are taken into it; ``dropped``: those that are made for it alone."""
        for number in set(self.given.get(call, {}).values()).intersection(taken):
            found = self.by_number[number]
            if number in dropped:
                if self.may_write(number, taken, dropped):
                    return True
                continue
            last = max(k for k, use in enumerate(found.uses) if call in use.calls)
            if not found.uses[last].is_last and (found.is_lost or last + 1 < len(found.uses)):
                return True
        return False

    def _place_of(self, number: int) -> tuple[int, int]:
        statement = self._statements[number]
        return statement.lineno, statement.col_offset

    def assignments(self, numbers: Collection[int]) -> list[ast.stmt]:
        """The assignments whose values are these calls."""
        return [self._statements[number] for number in numbers]

    # -- statements

    def _block(self, statements: list[ast.stmt], reaching: Reaching) -> None:
        for statement in statements:
            if isinstance(statement, ast.If):
                self._if(statement, reaching)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return, ast.Raise, ast.Assert)):
                self._simple(statement, reaching)
            else:
                self._other(statement, reaching)

    def _simple(self, statement: ast.stmt, reaching: Reaching) -> None:
        value = getattr(statement, "value", None)
        self._bound = names_bound([statement])
        for child in [value] if isinstance(value, ast.expr) else operands(statement):
            self._expression(child, reaching, ())
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            return
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if not isinstance(target, ast.Name):
                self._lose(names_read([target]), reaching)
        self._bind(names_bound(targets), reaching)
        if _stores_into_objects(targets):
            self._forbid(reaching.values())
        number = self._numbers.get(id(value))
        target = targets[0]
        if (
            value is None
            or number is None
            or len(targets) > 1
            or not isinstance(target, ast.Name)
            or _has_own_frame(value)
        ):
            return
        name = target.id
        if name in self._captured:
            return
        mentions = {x.id for x in ast.walk(value) if isinstance(x, ast.Name)}
        for inner in self.given.get(number, {}).values():
            mentions |= self.by_number[inner].mentions
        self.by_number[number] = Definition(name, mentions - {name}, name in mentions)
        self._statements[number] = statement
        reaching[name] = number, self.by_number[number]

    def _if(self, statement: ast.If, reaching: Reaching) -> None:
        self._bound = set()
        self._expression(statement.test, reaching, ())
        bound: set[str] = set()
        for block in (statement.body, statement.orelse):
            inside = dict(reaching)
            self._block(block, inside)
            bound |= names_bound(block)
            self._mark_lost(found for name, found in inside.items() if reaching.get(name) != found)
        self._forget(bound, reaching)
        if _stores_into_objects([*statement.body, *statement.orelse]):
            self._forbid(reaching.values())

    def _other(self, statement: ast.stmt, reaching: Reaching) -> None:
        """Loops, ``with``, ``try``, ``x += 1`` and what is rare: nothing is taken across their borders."""
        self._lose(_free(statement), reaching)
        self._forget(names_bound([statement]), reaching)
        if _stores_into_objects([statement]):
            self._forbid(reaching.values())
        if isinstance(statement, FUNCTIONS):
            return
        before = set(self.by_number)
        for block in _all_blocks(statement):
            self._block(block, {})
        # Also those that the block itself replaces: an exception or a break may leave it before.
        self._mark_lost((n, self.by_number[n]) for n in self.by_number.keys() - before)

    # -- expressions

    def _expression(self, node: ast.AST, reaching: Reaching, around: tuple[int, ...]) -> None:
        if isinstance(node, _SCOPES):
            self._lose(names_read([node]), reaching)
            for call in around:
                self._blocked |= {(call, name) for name in names_read([node])}
            return
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in LOOKS:
            self._use(node.value.id, reaching, around)
            return
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self._use(node.id, reaching, around)
                self._forbid(found for name, found in reaching.items() if name == node.id)
            return
        number = self._numbers.get(id(node))
        inside = around if number is None else (*around, number)
        for child in operands(node):
            self._expression(child, reaching, inside)

    def _use(self, name: str, reaching: Reaching, around: tuple[int, ...]) -> None:
        if name not in reaching:
            self._blocked |= {(call, name) for call in around}
            return
        number, found = reaching[name]
        self._certain[name] += 1
        found.uses.append(Use(frozenset(around if found.usable else ()), name in self._bound))
        for call in around:
            if found.usable and self.given.get(call, {}).get(name, number) == number:
                self.given.setdefault(call, {})[name] = number
            else:
                self._blocked.add((call, name))

    # -- what reaches a place

    def _bind(self, names: Iterable[str], reaching: Reaching) -> None:
        """Variables are assigned: what they were is certainly gone, and calls that mention them mean another value."""
        for name in names:
            reaching.pop(name, None)
            self._forbid(found for found in reaching.values() if name in found[1].mentions)

    def _forget(self, names: Iterable[str], reaching: Reaching) -> None:
        """Variables may have been assigned."""
        self._mark_lost(reaching[name] for name in names if name in reaching)
        self._bind(names, reaching)

    def _lose(self, names: Iterable[str], reaching: Reaching) -> None:
        """Variables are used where nothing can be taken in."""
        found = [reaching[name] for name in names if name in reaching]
        self._mark_lost(found)
        self._forbid(found)

    def _mark_lost(self, found: Iterable[tuple[int, Definition]]) -> None:
        for _, definition in found:
            definition.is_lost = True

    def _forbid(self, found: Iterable[tuple[int, Definition]]) -> None:
        for _, definition in found:
            definition.usable = False


class _Replace(ast.NodeTransformer):
    def __init__(self, replaced: Mapping[str, ast.expr]) -> None:
        self._replaced = replaced

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._replaced.get(node.id, node)


def _free(node: ast.AST) -> set[str]:
    """Variables that a statement reads, or a function reads of those around it."""
    found = names_read([node])
    return found - names_bound(node.body) - set(params_of(node)) if isinstance(node, ast.FunctionDef) else found


def _has_own_frame(node: ast.AST) -> bool:
    return any(isinstance(x, (*_FRAME, *_SCOPES)) for x in ast.walk(node))


def _stores_into_objects(nodes: Iterable[ast.AST]) -> bool:
    inside = (x for node in nodes for x in ast.walk(node) if isinstance(x, (ast.Attribute, ast.Subscript)))
    return any(not isinstance(x.ctx, ast.Load) for x in inside)


def _all_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Every block of a compound statement."""
    named = [getattr(statement, name, None) for name in ("body", "orelse", "finalbody")]
    handlers = [x.body for x in getattr(statement, "handlers", [])] + [x.body for x in getattr(statement, "cases", [])]
    return [x for x in [*named, *handlers] if isinstance(x, list)]
