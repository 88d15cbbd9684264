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
COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = MappingProxyType(
    {
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
    }
)
LARGEST = 2**63
"""Of the numbers that an expression may come to."""
NO_NUMBER = (ValueError, ZeroDivisionError, OverflowError)
"""What :func:`number_of` raises of an expression that is no number."""


def number_of(tree: ast.AST, names: Mapping[str, object] = MappingProxyType({})) -> float:
    """What an expression comes to: numbers, ``names`` that hold some, ``+ - * / // %``, ``int()``, comparisons and
    choices by them.

    Raises one of :data:`NO_NUMBER` for anything else.

    >>> number_of(ast.parse("int(-2 * (batch / 4))", mode="eval").body, {"batch": 10})
    -5
    """
    match tree:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool) and abs(value) < LARGEST:
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
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in COMPARISONS:
            return COMPARISONS[type(sign)](number_of(left, names), number_of(right, names))
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return number_of(body if number_of(test, names) else otherwise, names)
        case ast.Call(func=ast.Name(id="int"), args=[inner], keywords=[]):
            return int(number_of(inner, names))
    raise ValueError("an expression that is no number")
