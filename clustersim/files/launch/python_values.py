"""What names and expressions of a Python program hold, as far as its tree tells without running it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

DEPTH = 12
"""Names that are made of names, and functions that call functions."""
WIDEST = 2**40
"""Whole numbers beyond this are not worked out."""
_SUMS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class _Unread:
    """A value that only running the program tells."""


UNREAD = _Unread()


@dataclass
class CalledClass:
    """A class or function by its last name, with what it is given: of ``run.Config(Class, ...)`` the inner one."""

    kind: str
    given: dict[str, Any] = field(default_factory=dict)
    places: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class ProgramScope:
    """A module, or a function of it."""

    node: ast.Module | ast.FunctionDef

    def body(self) -> Iterator[ast.stmt]:
        """Its statements, those of blocks too, without those of functions inside."""
        waiting: list[ast.stmt] = list(self.node.body)
        while waiting:
            statement = waiting.pop(0)
            yield statement
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for inner in ("body", "orelse", "finalbody"):
                    waiting += getattr(statement, inner, [])

    def assigned(self, name: str) -> list[ast.expr]:
        """What a name is set to, each time."""
        return [
            statement.value
            for statement in self.body()
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name) and target.id == name
        ]


def last_name(node: ast.expr) -> str:
    """``c`` of ``a.b.c``."""
    return ast.unparse(node).rpartition(".")[2]


class ProgramValues:
    """Values of a program's expressions."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.module = ProgramScope(tree)
        self.functions = {item.name: ProgramScope(item) for item in tree.body if isinstance(item, ast.FunctionDef)}
        self.imported = {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }

    def scope_of(self, node: ast.AST) -> ProgramScope:
        """The function that holds a node, or the module."""
        inside = (scope for scope in self.functions.values() if any(item is node for item in ast.walk(scope.node)))
        return next(inside, self.module)

    def of(self, node: ast.expr, scope: ProgramScope, depth: int = 0) -> Any:
        """A literal, a list, a :class:`CalledClass`, or ``UNREAD``."""
        if depth > DEPTH:
            return UNREAD
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self.of(item, scope, depth + 1) for item in node.elts]
        if isinstance(node, ast.Name):
            return self._named(node.id, scope, depth + 1)
        if isinstance(node, ast.Attribute):
            root = ast.unparse(node).split(".")[0]
            return CalledClass(node.attr) if root in self.imported else UNREAD
        if isinstance(node, ast.BinOp):
            return self._sum(node, scope, depth + 1)
        return self._call(node, scope, depth + 1) if isinstance(node, ast.Call) else UNREAD

    def holders(self, call: ast.Call) -> list[tuple[ProgramScope, set[str]]]:
        """Where what a call makes has names: its own function, then those that get it from there."""
        met: list[tuple[ProgramScope, set[str]]] = []
        waiting: list[ast.Call] = [call]
        while waiting and len(met) < DEPTH:
            now = waiting.pop(0)
            scope = self.scope_of(now)
            names = {
                target.id
                for statement in scope.body()
                if isinstance(statement, ast.Assign) and statement.value is now
                for target in statement.targets
                if isinstance(target, ast.Name)
            }
            met.append((scope, names))
            returned = [item.value for item in scope.body() if isinstance(item, ast.Return)]
            if isinstance(scope.node, ast.FunctionDef) and any(
                item is now or (isinstance(item, ast.Name) and item.id in names) for item in returned
            ):
                waiting += self._calls_of(scope.node.name)
        return met

    def _calls_of(self, function: str) -> list[ast.Call]:
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
        ]

    def _named(self, name: str, scope: ProgramScope, depth: int) -> Any:
        values = scope.assigned(name)
        if isinstance(scope.node, ast.FunctionDef) and name in _parameters(scope.node):
            return UNREAD if values else self._parameter(name, scope.node, depth)
        if len(values) == 1:
            return self._changed(self.of(values[0], scope, depth), name, scope, depth)
        if not values and scope is not self.module:
            return self._named(name, self.module, depth)
        return CalledClass(name) if not values and name in self.imported else UNREAD

    def _changed(self, value: Any, name: str, scope: ProgramScope, depth: int) -> Any:
        """A class's arguments with those that are set afterwards: ``data.micro_batch_size = 2``."""
        for statement in scope.body() if isinstance(value, CalledClass) else ():
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if isinstance(target, ast.Attribute) and isinstance(statement, ast.Assign):
                root, *path = ast.unparse(target).split(".")
                if root == name and len(path) == 1 and statement in scope.node.body:
                    value.given[path[0]] = self.of(statement.value, scope, depth)
                elif root == name:
                    return UNREAD
        return value

    def _parameter(self, name: str, function: ast.FunctionDef, depth: int) -> Any:
        """What every call of a function gives, or its default where none does."""
        names = _parameters(function)
        values: list[Any] = []
        for call in self._calls_of(function.name):
            words = {word.arg: word.value for word in call.keywords}
            at = names.index(name)
            given = words.get(name) or (call.args[at] if at < len(call.args) else None)
            if None in words or any(isinstance(item, ast.Starred) for item in call.args):
                return UNREAD
            outer = self.scope_of(call)
            values.append(_default(function, name) if given is None else self.of(given, outer, depth + 1))
        if not values:
            return _default(function, name)
        return values[0] if all(type(item) is type(values[0]) and item == values[0] for item in values) else UNREAD

    def _sum(self, node: ast.BinOp, scope: ProgramScope, depth: int) -> Any:
        first = self.of(node.left, scope, depth)
        second = self.of(node.right, scope, depth)
        work = _SUMS.get(type(node.op))
        if work is None or type(first) is not int or type(second) is not int or max(abs(first), abs(second)) > WIDEST:
            return UNREAD
        return UNREAD if work is operator.floordiv and second == 0 else work(first, second)

    def _call(self, node: ast.Call, scope: ProgramScope, depth: int) -> Any:
        if any(word.arg is None for word in node.keywords):
            return UNREAD
        name = last_name(node.func)
        if isinstance(node.func, ast.Name) and name in self.functions:
            inner = self.functions[name]
            returned = [item.value for item in inner.body() if isinstance(item, ast.Return)]
            only = returned[0] if len(returned) == 1 else None
            return UNREAD if only is None else self.of(only, inner, depth)
        given = {str(word.arg): self.of(word.value, scope, depth) for word in node.keywords}
        places = [self.of(item, scope, depth) for item in node.args]
        if name in {"Config", "Partial"} and places and isinstance(places[0], CalledClass):
            return CalledClass(places[0].kind, given, places[1:])
        root = ast.unparse(node.func).split(".")[0].split("(")[0]
        return CalledClass(name, given, places) if root in self.imported else UNREAD


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [item.arg for item in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _default(function: ast.FunctionDef, name: str) -> Any:
    """A parameter's default, where it is written out."""
    places = [*function.args.posonlyargs, *function.args.args]
    defaults = dict(zip([item.arg for item in places][::-1], function.args.defaults[::-1], strict=False))
    defaults |= {
        item.arg: value
        for item, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        if value is not None
    }
    node = defaults.get(name)
    return node.value if isinstance(node, ast.Constant) else UNREAD
