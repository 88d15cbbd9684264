"""nanoGPT's files of ``config/``: assignments, of which values are read and nothing is run.

Values are constants, and sums, differences, products and quotients of them and of names assigned above, as
karpathy/nanoGPT's ``configurator.py`` would have them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import short
from clustersim.files.launch.arithmetic import NO_NUMBER, number_of

TELLING = ("block_size", "n_layer", "n_head", "n_embd", "gradient_accumulation_steps", "init_from", "eval_iters")
"""Names of ``train.py`` that others' files of assignments do not have together."""
ENOUGH = 2


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
    try:
        return number_of(expression, values)
    except NO_NUMBER:
        return None
