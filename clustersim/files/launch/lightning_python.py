"""Scripts of Lightning: what ``Trainer(...)`` is given, as LightningCLI's YAML has it. Read as a tree, never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import short
from clustersim.files.launch.python_values import last_name

PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
MATTERS = ("devices", "num_nodes", "precision", "strategy", "accumulate_grad_batches", "gradient_clip_val")
"""Arguments of ``Trainer`` that a scenario is made of: one that only running tells is asked for."""
OPTIMIZERS = ("AdamW", "Adam", "SGD")
WHOLE_MODEL = re.compile(r"\w*(?:ForCausalLM|ForSeq2SeqLM|ForConditionalGeneration|ForMaskedLM|LMHeadModel)")
"""Classes of transformers that are a whole language model, and not a part of somebody's module."""
ADAPTED = ("get_peft_model", "prepare_model_for_kbit_training")
"""What makes adapters of a model."""


def is_script(tree: ast.Module) -> bool:
    """Whether a program makes a Lightning Trainer."""
    return _trainer(tree) is not None


def options(tree: ast.Module, name: str) -> Iterator[tuple[str, Any]]:
    """Options as the YAML has them. Raises :class:`ScenarioError` for one that only running the program tells."""
    made = _trainer(tree)
    known = _constants(tree)
    yield "trainer.strategy", "auto"
    for word in made.keywords if made is not None else ():
        value = known.get(word.value.id) if isinstance(word.value, ast.Name) else word.value
        if isinstance(value, ast.Call) and word.arg == "strategy":
            yield from _strategy(value)
        elif word.arg and (plain := _plain(value)) is not None:
            yield f"trainer.{word.arg}", plain
        elif word.arg in MATTERS and not (isinstance(value, ast.Constant) and value.value is None):
            raise ScenarioError(
                f"{name} (line {word.value.lineno}): Trainer's {word.arg} is {short(ast.unparse(word.value))}, which "
                "only running tells; write its value"
            )
    yield from _model(tree, known, name)
    optimizers = {word for word in OPTIMIZERS if _calls(tree, word)}
    if len(optimizers) == 1:
        yield "optimizer.class_path", optimizers.pop()
    sizes = {
        _plain(word.value) for call in _calls(tree, "DataLoader") for word in call.keywords if word.arg == "batch_size"
    }
    if len(sizes) == 1 and (size := sizes.pop()) is not None:
        yield "data.batch_size", size


def _model(tree: ast.Module, known: dict[str, ast.expr], name: str) -> Iterator[tuple[str, Any]]:
    """The language model that is loaded by its name, where it is the only one. Raises :class:`ScenarioError` for
    adapters."""
    adapted = next((call for word in ADAPTED for call in _calls(tree, word)), None)
    if adapted is not None:
        raise ScenarioError(
            f"{name} (line {adapted.lineno}): {last_name(adapted.func)} trains adapters, which are not read of a "
            "program; write [model.adapter] yourself (clustersim new scenario)"
        )
    loaded = set()
    for call in _calls(tree, "from_pretrained"):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if call.args and owner is not None and WHOLE_MODEL.fullmatch(last_name(owner)):
            first = call.args[0]
            loaded.add(_plain(known.get(first.id) if isinstance(first, ast.Name) else first))
    if len(loaded) == 1 and isinstance(model := loaded.pop(), str):
        yield "lightning.model", model


def _strategy(call: ast.Call) -> Iterator[tuple[str, Any]]:
    yield "trainer.strategy.class_path", last_name(call.func)
    for word in call.keywords:
        value = _plain(word.value)
        if isinstance(word.value, ast.Attribute):
            value = word.value.attr  # ShardingStrategy.FULL_SHARD
        if word.arg and not (isinstance(word.value, ast.Constant) and word.value.value is None):
            yield f"trainer.strategy.init_args.{word.arg}", ast.unparse(word.value) if value is None else value


def _trainer(tree: ast.Module) -> ast.Call | None:
    """The call with the most arguments, of those that make Lightning's Trainer."""
    modules: set[str] = set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {(alias.asname or alias.name) for alias in node.names if alias.name.split(".")[0] in PACKAGES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "Trainer"}
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "pytorch"}
    calls = [
        call for call in _calls(tree, "Trainer") if ast.unparse(call.func) in names | {f"{m}.Trainer" for m in modules}
    ]
    return max(calls, key=lambda call: len(call.keywords), default=None)


def _calls(tree: ast.Module, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and last_name(node.func) == name]


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that are set once, with what they are set to."""
    seen: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            seen.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in seen.items() if len(values) == 1}


def _plain(node: ast.expr | None) -> Any:
    """A value that is written out, as a list where it is one; None for another."""
    try:
        value = ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return list(value) if isinstance(value, tuple) else value if isinstance(value, str | int | float | list) else None
