"""torchtitan's configurations since 0.3, functions of Python (``config_registry.py``): read as a tree, and never run.

A function returns ``Trainer.Config(...)`` of constants, or takes another's and sets fields of it; a command names it by
``--module`` and ``--config`` (torchtitan/config/manager.py). What is no constant is handed on as its text.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustersim.core.errors import ScenarioError, few, nearest
from clustersim.core.texts import short
from clustersim.files.launch.files import PYTHON, Document, OptionValue
from clustersim.files.launch.table import FrameworkTable

DEPTH = 20
"""Configurations that are made of others."""
MODES = {"SelectiveAC": "selective", "FullAC": "full", "None": "none"}
CONVERTERS = {
    "Float8LinearConverter": "quantize.linear.float8",
    "Float8GroupedExpertsConverter": "quantize.grouped_mm.float8",
    "MXFP8LinearConverter": "quantize.linear.mx",
    "MXFP8GroupedExpertsConverter": "quantize.grouped_mm.mx",
}
OTHERS = {
    "Controller.Config": "which trains by reinforcement learning, on generated text",
    "FluxTrainer.Config": "which trains a model that makes images",
    "GraphTrainer.Config": "whose step is traced and compiled as a whole (graph_trainer), which is not played",
    "FaultTolerantTrainer.Config": "whose replicas are averaged over torchft, which is not played",
}
"""What other trainers of torchtitan do."""
SHOWN = 6


@dataclass
class Made:
    """A call by its name, with what is given by name and by place; or a name that holds nothing known."""

    name: str
    given: dict[str, Any] = field(default_factory=dict)
    places: list[Any] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The class, of ``FullAC.Config()``."""
        return self.name.removesuffix(".Config").rsplit(".", 1)[-1]


def arranged(read: Sequence[Document], table: FrameworkTable) -> None:
    """Give each document of Python the options of the configuration that a command, or the file itself, names.

    Raises :class:`ScenarioError` where that is none of it, and where nobody says which of many.
    """
    for document in read:
        if document.kind == PYTHON:
            functions = _functions(document)
            wanted = next((_named(source, "config") for source in read if _named(source, "config")), "")
            name = wanted if wanted or len(functions) != 1 else next(iter(functions))
            if name not in functions:
                if name:
                    raise ScenarioError(f"{document.name}: has no configuration {name!r}; {nearest(name, functions)}")
                raise ScenarioError(
                    f"{document.name}: holds the configurations {few(list(functions), SHOWN)}; give the script that "
                    "has --config NAME too"
                )
            kind = ast.unparse(functions[name].returns or ast.Constant(None)).strip("'")
            if kind != "Trainer.Config":
                why = OTHERS.get(kind, "which is not read")
                raise ScenarioError(f"{document.name}: {name} is a {kind}, {why}; those of Trainer.Config are")
            config = _config(name, functions, document, 0)
            if config.name != kind:
                raise ScenarioError(
                    f"{document.name}: {name} takes its values of {config.name}, which the file does not hold without "
                    "arguments; write them there as Trainer.Config(...)"
                )
            module = next((_named(source, "module") for source in read if _named(source, "module")), "")
            for option, value in _options(config, module or _module(document.name, name, table)):
                document.options["config", option] = OptionValue(option, value, f"{document.name} ({name})")
            _graphed(document, name)
            _flexed(document)
    for document in read:
        for option in ("config", "module") if any(source.kind == PYTHON for source in read) else ():
            document.options.pop(("args", option), None)


def _named(document: Document, option: str) -> str:
    option_value = document.options.get(("args", option))
    return str(option_value.value) if option_value is not None and document.kind != PYTHON else ""


def _functions(document: Document) -> dict[str, ast.FunctionDef]:
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ScenarioError(f"{document.name}: is not a program of Python that can be read") from None
    by_name = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    return {name: node for name, node in by_name.items() if node.returns and "Config" in ast.unparse(node.returns)}


def _graphed(document: Document, name: str) -> None:
    """Forward and backward in one CUDA graph, as torchtitan 0.3 has them unless told otherwise (its trainer.py)."""
    key = "config", "training.disable_cuda_graphs"
    if key not in document.options:
        document.options[key] = OptionValue(key[1], False, f"{document.name} ({name})")
        document.notes.append(
            f"{document.name}: forward and backward are one CUDA graph, as torchtitan 0.3 has them by default"
        )


def _flexed(document: Document) -> None:
    """A note on attention that nobody names, which is FlexAttention's in 0.3 (``model_registry`` of each model)."""
    if ("config", "model_spec.attn_backend") not in document.options:
        document.notes.append(
            f"{document.name}: no attn_backend: torchtitan 0.3 takes FlexAttention inside of documents; attention is "
            "over the whole sample, by the kernel that PyTorch picks"
        )


def _config(name: str, functions: dict[str, ast.FunctionDef], document: Document, depth: int) -> Made:
    """What a function returns; statements that are not read get a note of ``document``."""
    file_name = document.name
    if depth > DEPTH:
        raise ScenarioError(f"{file_name}: its configurations are made of each other in a circle")
    settings: dict[str, Any] = {}

    def value(node: ast.AST | None) -> Any:
        """A literal or a list of such, what a name stands for, a call as ``Made``; else the expression's text."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [value(element) for element in node.elts]
        if isinstance(node, ast.Name):
            return settings.get(node.id, Made(node.id))
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in functions and not node.args and not node.keywords:
                return _config(called, functions, document, depth + 1)
            given = {element.arg: value(element.value) for element in node.keywords if element.arg}
            return Made(called, given, [value(element) for element in node.args])
        return Made(ast.unparse(node) if node is not None else "None")

    for statement in functions[name].body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            settings[statement.targets[0].id] = value(statement.value)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute):
            _set(ast.unparse(statement.targets[0]).split("."), value(statement.value), settings)
        elif isinstance(statement, ast.Return):
            built = value(statement.value)
            if isinstance(built, Made):
                return built
        elif _changes(statement):
            line = ast.unparse(statement).partition("\n")[0]
            document.notes.append(f"{file_name} ({name}): {short(line)} is not read; what it changes is left out")
    raise ScenarioError(f"{file_name}: {name} returns no configuration that can be read")


def _changes(statement: ast.stmt) -> bool:
    """Whether a statement that is not read may change a configuration: no import, no check and no docstring."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return False
    return not isinstance(statement, ast.Import | ast.ImportFrom | ast.Assert | ast.Pass | ast.FunctionDef)


def _set(path: list[str], value: Any, settings: dict[str, Any]) -> None:
    """``config.training.seq_len = 4096``."""
    inner = settings.get(path[0])
    for part in path[1:-1]:
        inner = inner.given.setdefault(part, Made("")) if isinstance(inner, Made) else None
    if isinstance(inner, Made):
        inner.given[path[-1]] = value


def _module(file: str, function: str, table: FrameworkTable) -> str:
    """The model's name: of the folder, or as the function's begins."""
    names = {str(pair[0]).split()[0] for row in table.rows if row.field == "model.name" for pair in row.map or ()}
    folder = Path(file).resolve().parent.name
    return folder if folder in names else next((name for name in names if function.startswith(name)), folder)


def _options(config: Made, module: str) -> Iterator[tuple[str, Any]]:
    """Fields as the sections of a file have them; one that is no constant as its text, which the table judges."""
    for section, part in config.given.items():
        if section == "model_spec":
            yield from _model(part, module)
        elif section in _SECTIONS:
            yield from _SECTIONS[section](part)
        elif isinstance(part, Made):
            if section == "dataloader" and part.kind.startswith(("MM", "_mm")):
                yield "dataloader.images", True
            if section == "compile" and part.kind == "CompileConfig" and "enable" not in part.given:
                yield COMPILED, True
            yield from _fields(section, part)
        elif isinstance(part, str | int | float | bool):
            yield section, part
    if "activation_checkpoint" not in config.given:
        yield "activation_checkpoint.selective_ac_option", "op"


def _fields(section: str, made_section: Made, but: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    for name, value in made_section.given.items():
        if name == "context_parallel_load_balancer":
            yield f"{section}.{name}", _balancer(value)
        elif value is not None and name not in but:
            yield f"{section}.{name}", _plain(value)


def _plain(value: Any) -> Any:
    """A constant as it is, and what is none as text."""
    if isinstance(value, Made):
        return value.name
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _balancer(value: Any) -> Any:
    """A word, or a class since torchtitan counts tokens; none without one."""
    if isinstance(value, Made):
        return "headtail" if value.name.startswith("HeadTail") else value.kind
    return value or ""


def _recomputed(recompute_section: Any) -> Iterator[tuple[str, Any]]:
    """By a class of its own since 0.3, by a mode before."""
    kind = recompute_section.kind if isinstance(recompute_section, Made) else str(recompute_section)
    if kind != "ActivationCheckpointConfig":
        yield "activation_checkpoint.mode", MODES.get(kind, kind)
        yield "activation_checkpoint.selective_ac_option", "op"
    if isinstance(recompute_section, Made):
        yield from _fields("activation_checkpoint", recompute_section)


def _optimizer(optimizer_section: Any) -> Iterator[tuple[str, Any]]:
    """By the name in its groups of parameters since 0.3, by its own before."""
    kind = optimizer_section.kind if isinstance(optimizer_section, Made) else str(optimizer_section)
    if not isinstance(optimizer_section, Made) or kind not in CONTAINERS:
        yield "optimizer.name", "AdamW" if kind == "default_adamw" else kind
        return
    groups = optimizer_section.given.get("param_groups")
    if isinstance(groups, list) and all(isinstance(group, Made) for group in groups):
        names = {str(_plain(group.given.get("optimizer_name"))) for group in groups}
        if names:
            yield "optimizer.name", " and ".join(sorted(names))
    elif groups is not None:  # which no table has as an optimizer
        yield "optimizer.name", str(_plain(groups))
    if kind == CONTAINERS[1]:
        yield "optimizer.early_step_in_backward", True
    yield from _fields("optimizer", optimizer_section, ("param_groups",))


COMPILED = "compile.there"
"""Said of a section without ``enable``, by whose presence releases after 0.3 compile (torchtitan/config/compile.py)."""
CONTAINERS = ("OptimizersContainer", "OptimizersInBackwardContainer")


CHUNKED = ("ChunkedLossWrapper", "ChunkedCELoss")
"""A loss in chunks, by its name in 0.3 and before."""


def _loss(loss_section: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(loss_section, Made):
        yield "loss.chunked", loss_section.kind in CHUNKED
        if "num_chunks" in loss_section.given:
            yield "loss.num_chunks", _plain(loss_section.given["num_chunks"])


def _converters(converter_section: Any) -> Iterator[tuple[str, Any]]:
    """A section of its own before 0.3, where float8's recipe was one scale a tensor unless told otherwise."""
    if isinstance(converter_section, Made):
        yield from _converted(converter_section.given.get("converters"), {})


def _converted(converters: Any, usual: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Converters and their fields, as a file of 0.2 has them. ``usual`` : the recipe of each where it says none."""
    if not converters:
        return
    several = converters if isinstance(converters, list) else []
    listed = [converter for converter in several if isinstance(converter, Made)]
    names = [CONVERTERS.get(converter.kind, converter.kind) for converter in listed]
    yield "model.converters", names or [_plain(converters)]
    for name, converter in zip(names, listed, strict=True):
        fields = dict(_fields(name, converter))
        if name in usual:
            fields.setdefault(f"{name}.recipe_name", usual[name])
        yield from fields.items()


_SECTIONS: dict[str, Callable[[Any], Iterator[tuple[str, Any]]]] = {
    "activation_checkpoint": _recomputed,
    "loss": _loss,
    "model_converters": _converters,
    "optimizer": _optimizer,
}
"""Sections that a file has otherwise."""
QUANTIZING = ("converters", "quantization")
"""Converters of a model, by the argument's name in 0.3 and before."""
ROWWISE = {"quantize.linear.float8": "rowwise"}
"""Recipes of 0.3 (components/quantization/float8.py)."""


def _model(built: Any, module: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(built, Made) or not built.places:
        return
    yield "model.name", module
    yield "model.flavor", _plain(built.places[0])
    for name, setting in built.given.items():
        if name not in QUANTIZING and setting is not None:
            yield f"model_spec.{name}", _plain(setting)
    for name in QUANTIZING:
        yield from _converted(built.given.get(name), ROWWISE)
