"""``clustersim trace-model``: somebody's own module as a model file."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustersim.app.cli.common import OUT_FILE, PATH, working
from clustersim.app.cli.tables import stdout
from clustersim.core.errors import ClusterSimError, ModelError, needs
from clustersim.core.outputs import fresh, ours, writing
from clustersim.core.texts import shown
from clustersim.core.units import format_bytes
from clustersim.model.traced import FORMAT, read_traced
from clustersim.model.traced.schema import TYPES

if TYPE_CHECKING:
    from clustersim.model.traced import ModelFile

READ_OF_TORCH = {
    "torch._C": "_current_autograd_node",
    "torch.autograd": "_get_sequence_nr",
    "torch._subclasses.fake_tensor": "DynamicOutputShapeException",
    "torch.utils.checkpoint": "_checkpoint_without_reentrant_generator",
    "torch.utils.flop_counter": "flop_registry",
}
"""What is not of PyTorch's public face, by module."""


@click.command(short_help="Trace a PyTorch module of your own to a model file, which runs without torch.")
@click.argument("target", metavar="TARGET")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    metavar="KIND[SIZES]",
    help="An input, samples first: 'tokens[4, 8192]', 'images[8, 3, 224, 224]', 'NAME=floats[4, 100, 80]'; in order.",
)
@click.option("--config", type=PATH, help="The config.json of a class of transformers.")
@click.option("--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="What the module is built with, as TOML.")
@click.option("--types", multiple=True, type=click.Choice(TYPES), help="What it runs in.  [all in which it runs]")
@click.option("--loss", type=click.Choice(("none", "cross_entropy")), help="Behind a module that returns no loss.")
@click.option("--name", default="", help="What to call the model.")
@click.option("--out", type=OUT_FILE, metavar="FILE", help="Where it is written.  [NAME.model.json]")
@click.option("--trust", is_flag=True, help="Run code that a config.json brings (auto_map), as trust_remote_code does.")
def trace_model(
    target: str,
    inputs: tuple[str, ...],
    config: Path | None,
    arguments: tuple[str, ...],
    types: tuple[str, ...],
    loss: str | None,
    name: str,
    out: Path | None,
    trust: bool,
) -> None:
    """Trace a step of TARGET on a CPU, without weights, and write what it does to a model file.

    TARGET is FILE.py:FUNCTION, which runs that file; MODULE:NAME of an installed one; timm:NAME or torchvision:NAME; or
    transformers:CLASS with --config. The function returns the module, and may be a class. Its forward returns a loss,
    or tensors.

    The file is named in a scenario: [model] file = "my.model.json". It needs no torch any more.
    """
    if out is not None and out.suffix != ".json":
        raise ClusterSimError(f"{out}: model files end in .model.json")
    model_file = _traced(target, inputs, config, _arguments(arguments), (types, loss or "", name, trust))
    file = out or Path(f"{model_file.name.replace('/', '_')}.model.json")
    _write(file, model_file)
    _say(file, model_file)


def _traced(
    words: str,
    inputs: tuple[str, ...],
    config: Path | None,
    arguments: dict[str, Any],
    how: tuple[tuple[str, ...], str, str, bool],
) -> ModelFile:
    """The file that a command asks for."""
    _check_torch()
    from clustersim.model.tracing import trace_model as traced
    from clustersim.model.tracing.inputs import read_input
    from clustersim.model.tracing.loading import Target, target_of

    types, loss, name, trust = how
    module, attribute = target_of(words)
    target = Target(module, attribute, config, arguments, trust)
    specs = tuple(map(read_input, inputs))
    with working(f"tracing {words}"):
        return traced(target, specs, tuple(kind for kind in TYPES if kind in types), name=name, loss=loss)


def _check_torch() -> None:
    """Raise :class:`ClusterSimError` where PyTorch is not there, or has not what a trace reads of it."""
    try:
        import torch
    except ImportError:
        raise ClusterSimError(needs("trace-model", "torch")) from None
    for module, name in READ_OF_TORCH.items():
        try:
            is_there = hasattr(import_module(module), name)
        except ImportError:
            is_there = False
        if not is_there:
            raise ClusterSimError(
                f"torch {torch.__version__}: has no {module}.{name}, which a trace reads; tried is torch 2.13"
            )


def _arguments(texts: tuple[str, ...]) -> dict[str, Any]:
    """``("layers=4",)`` -> ``{"layers": 4}``; a bare word is text."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ModelError(f"--arg {shown(text)}: write it as NAME=VALUE, like layers=4")
        try:
            values[name.strip()] = tomllib.loads(f"value = {value}")["value"]
        except (tomllib.TOMLDecodeError, ValueError, RecursionError):
            values[name.strip()] = value.strip()
    return values


def _write(file: Path, model_file: ModelFile) -> None:
    """The file, if it reads back as a model in each of its types."""
    import msgspec

    ours(file, FORMAT.encode())
    with writing(file), fresh(file) as path:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(model_file), indent=1) + b"\n")
        for place, types in enumerate(TYPES):
            if types in model_file.works[0]:
                read_traced(path, place)


def _say(file: Path, model_file: ModelFile) -> None:
    lines: list[str] = []
    for place, types in enumerate(TYPES):
        if types not in model_file.works[0]:
            continue
        model = read_traced(file, place)
        if not lines:
            kinds = [layer.kind for layer in model.layers]
            size = f"{model.parameters:,} parameters in {len(kinds)} layers"
            lines.append(f"{model.name}: {size}, {kinds.count('block')} of them blocks")
        kept_bytes = sum(kernel.kept_bytes(place) for layer in model.layers for kernel in layer.kernels)
        lines.append(
            f"{types}: {model.flops_per_sample():.4g} FLOPs a sample, {format_bytes(kept_bytes)} kept for backward, "
            f"{sum(len(layer.kernels) for layer in model.layers):,} kernels"
        )
    splits = "data parallelism and pipelines" if model_file.chained else "data parallelism"
    lines += [f"it is split by {splits}", *(f"note: {note}" for note in model_file.notes)]
    lines.append(f'wrote {file}; in a scenario: [model] file = "{file.name}"')
    for line in lines:
        stdout().say(line)
