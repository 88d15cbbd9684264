"""nanoGPT's files of ``config/``: assignments, of which values are read and nothing is run.

Values are constants, and sums, differences, products and quotients of them and of names assigned above, as
karpathy/nanoGPT's ``configurator.py`` would have them.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import short

TELLING = ("block_size", "n_layer", "n_head", "n_embd", "gradient_accumulation_steps", "init_from", "eval_iters")
"""Names of ``train.py`` that others' files of assignments do not have together."""
ENOUGH = 2
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
LARGEST = 2**53
"""Of the numbers that an expression may come to."""


def is_configuration(tree: ast.Module) -> bool:
    """Whether a program is a file of ``config/``: assignments, with enough of nanoGPT's own names."""
    plain = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.Expr)
    names = {target.id for target, _ in _assigned(tree)}
    return all(isinstance(node, plain) for node in tree.body) and len(names & set(TELLING)) >= ENOUGH


def options(tree: ast.Module, name: str) -> Mapping[str, Any]:
    """Values by name; of those that only running tells, what is written."""
    values: dict[str, Any] = {}
    for target, expression in _assigned(tree):
        value = _value(expression, values)
        if value is None and target.id in (*TELLING, "batch_size", "dtype", "compile", "bias", "dropout"):
            raise ScenarioError(
                f"{name} (line {target.lineno}): {target.id} is {short(ast.unparse(expression))}, which only running "
                "tells; write its value"
            )
        values[target.id] = ast.unparse(expression) if value is None else value
    return values


def _assigned(tree: ast.Module) -> list[tuple[ast.Name, ast.expr]]:
    """(name, expression) of every assignment to one name at the top of a program, in order."""
    pairs: list[tuple[ast.Name, ast.expr]] = []
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        pairs += [(target, value) for target in targets if isinstance(target, ast.Name) and value is not None]
    return pairs


def _value(expression: ast.expr, values: Mapping[str, Any]) -> Any:
    """What an expression comes to; None where only running tells."""
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, ast.Name):
        return values.get(expression.id)
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
        inner = _value(expression.operand, values)
        return -inner if _is_number(inner) else None
    if isinstance(expression, ast.BinOp) and type(expression.op) in _OPERATORS:
        left, right = _value(expression.left, values), _value(expression.right, values)
        divides = isinstance(expression.op, ast.Div | ast.FloorDiv)
        if not _is_number(left) or not _is_number(right) or (divides and right == 0):
            return None
        result = _OPERATORS[type(expression.op)](left, right)
        return result if abs(result) < LARGEST else None
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
