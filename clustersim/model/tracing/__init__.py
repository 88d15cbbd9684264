"""Any torch module as a model file: built on the meta device, its step traced on fake tensors. Needs torch.

No weight is ever made: a module of 400 billion parameters is traced on a laptop. What comes out is read without torch
(:mod:`clustersim.model.traced`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from clustersim.core.errors import ClusterSimError, ModelError
from clustersim.model.traced import TYPES, ModelFile
from clustersim.model.traced.schema import TypesName
from clustersim.model.tracing.blame import blamed
from clustersim.model.tracing.describing import TracedSource, TypedLayers, model_file, typed_layers
from clustersim.model.tracing.inputs import InputSpec, batch_of
from clustersim.model.tracing.loading import Built, Target, built, frozen, one_sequence_a_sample
from clustersim.model.tracing.step import TracedStep, traced_step

__all__ = ["trace_model"]


def trace_model(
    target: Target, inputs: tuple[InputSpec, ...], types: tuple[TypesName, ...], *, name: str = "", loss: str = ""
) -> ModelFile:
    """Build what a target says, trace a step of it in each setting of types, and describe it.

    Parameters
    ----------
    inputs : of the module's forward, in order; samples are their first dimension. types : of
        :data:`clustersim.model.traced.TYPES`; empty for all in which the module runs.
    name : of the model; what was traced has one otherwise.
    loss : ``"none"`` or ``"cross_entropy"`` behind a module that returns no loss; the library's usual by default.

    Raises :class:`ModelError`: of the module's own errors with the line of its code.
    """
    batch = batch_of(inputs)
    with _blaming(target, "built"), contextlib.redirect_stdout(sys.stderr):
        made = built(target)
    module: torch.nn.Module = made.module
    if still := frozen(module):
        raise ModelError(
            f"{target.words}: {still}: a model that is trained in part is not described yet; let the function set "
            "requires_grad_(True), or register them as buffers"
        )
    module.train()
    given = tuple(_named(spec, made) for spec in inputs)
    typed: dict[TypesName, TypedLayers] = {}
    failed: dict[str, ModelError] = {}
    for setting in types or TYPES:
        try:
            with _blaming(target, f"run on {', '.join(map(str, given))} in {setting}"):
                step = _step(made, given, setting, loss or made.loss)
        except ModelError as error:
            if types:
                raise
            failed[setting] = error
            continue
        typed[setting] = typed_layers(module, step, batch, setting)
    if not typed:
        raise next(iter(failed.values()))
    left_out = tuple(f"not traced in {setting}: {error}" for setting, error in failed.items())
    return model_file(module, TracedSource(name or made.name, target.words, given, left_out), typed, step.trace)


def _step(made: Built, inputs: tuple[InputSpec, ...], types: TypesName, loss: str) -> TracedStep:
    more = {
        name: value
        for name, value in made.more.items()
        if not str(value).startswith("like ") or any(spec.name == str(value)[5:] for spec in inputs)
    }
    with one_sequence_a_sample(), contextlib.redirect_stdout(sys.stderr):
        return traced_step(made.module, inputs, types, loss, more)


def _named(spec: InputSpec, made: Built) -> InputSpec:
    """The input, by the name that such a module gives it."""
    usual = {"tokens": made.tokens, "images": made.images}.get(spec.kind, "")
    return spec if spec.name or not usual else InputSpec(spec.kind, spec.shape, usual)


@contextlib.contextmanager
def _blaming(target: Target, doing: str) -> Iterator[None]:
    """Whatever the module's own code raises is said of its line."""
    try:
        yield
    except (ClusterSimError, KeyboardInterrupt, MemoryError, GeneratorExit):
        raise
    except BaseException as error:
        raise blamed(error, target, doing) from None
