"""Sums of numbers in an expression of Python, which is not run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
)
LARGEST = 2**53
"""Of the numbers that an expression may come to."""
NO_NUMBER = (ValueError, ZeroDivisionError, OverflowError)
"""What :func:`number_of` raises of an expression that is no number."""


def number_of(tree: ast.AST, names: Mapping[str, object] = MappingProxyType({})) -> float:
    """What an expression of numbers, of ``names`` that hold some, of ``+ - * / // %`` and ``int()`` comes to.

    Raises one of :data:`NO_NUMBER` for anything else.

    >>> number_of(ast.parse("int(-2 * (batch / 4))", mode="eval").body, {"batch": 10})
    -5
    """
    match tree:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            held = names.get(name)
            if isinstance(held, int | float) and not isinstance(held, bool):
                return held
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -number_of(inner, names)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            total: float = OPERATORS[type(sign)](number_of(left, names), number_of(right, names))
            if abs(total) < LARGEST:
                return total
        case ast.Call(func=ast.Name(id="int"), args=[inner], keywords=[]):
            return int(number_of(inner, names))
    raise ValueError("an expression that is no number")
