"""One step of a module on fake tensors: no weights, no arithmetic, only shapes and types."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from clustersim.core.errors import ModelError
from clustersim.model.traced.schema import TypesName
from clustersim.model.tracing.events import StepTrace
from clustersim.model.tracing.functions import GpuFunctions, without_checkpoints
from clustersim.model.tracing.inputs import InputSpec
from clustersim.model.tracing.recorder import Recorder


class TracedStep(msgspec.Struct, frozen=True):
    """A step as it was recorded.

    Parameters
    ----------
    checkpointed : functions that the module checkpoints. uncounted : operators of whose FLOPs nothing is known.
    unfused : why attentions run as products and a softmax.
    loss : how its backward begins, in words; empty where the module returns a loss.
    """

    trace: StepTrace
    checkpointed: tuple[str, ...]
    uncounted: tuple[str, ...]
    unfused: tuple[str, ...]
    loss: str


def traced_step(
    module: torch.nn.Module,
    inputs: tuple[InputSpec, ...],
    types: TypesName,
    loss: str,
    more: Mapping[str, Any],
) -> TracedStep:
    """Trace forward and backward.

    Parameters
    ----------
    module : on any device; its parameters are replaced by fake ones of the wanted type. loss : ``"none"`` or
        ``"cross_entropy"``, where the module returns none itself. more : further keyword arguments of its forward;
        the text ``"like NAME"`` is an input of whole numbers of that input's shape, ``"classes"`` one for each sample.
    """
    half = torch.bfloat16
    # What its rules refuse comes back as an exception, and need not be logged as well.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    gc.collect()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        _fake(module, half if types == "bf16" else torch.float32)
        recorder = Recorder(module)
        positional, named = _arguments(inputs, more, half if types == "bf16" else torch.float32)
        with _cells(), GpuFunctions(recorder), without_checkpoints() as seen, recorder.watching() as trace:
            with torch.autocast("cpu", dtype=half, enabled=types == "autocast"):
                begin, described = _begun(module(*positional, **named), loss)
            recorder.turns()
            begin.backward(torch.ones_like(begin))
            del begin
    uncounted, unfused = (tuple(sorted(names)) for names in (recorder.uncounted, recorder.unfused))
    return TracedStep(trace, tuple(dict.fromkeys(seen)), uncounted, unfused, described)


def _fake(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Replace a module's tensors by fake ones on a CPU; floating ones have the type, as ``module.to(dtype)`` gives it.
    What was one tensor under two names stays one."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor for one of the module's; shared ones stay shared."""
        if id(tensor) not in made:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            copy = torch.empty(tensor.shape, dtype=kind, device="cpu")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
            keep.append(tensor)
        return made[id(tensor)]

    keep: list[torch.Tensor] = []
    for child in module.modules():
        tables: list[dict[str, Any]] = [child._parameters, child._buffers, child.__dict__]
        for table in tables:
            for name, value in list(table.items()):
                if isinstance(value, torch.Tensor):
                    table[name] = fake(value)


def _arguments(
    inputs: tuple[InputSpec, ...], more: Mapping[str, Any], dtype: torch.dtype
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The inputs by place and by name."""
    by_name = {spec.name or str(place): (spec, _input(spec, dtype)) for place, spec in enumerate(inputs)}
    positional = [tensor for spec, tensor in by_name.values() if not spec.name]
    named: dict[str, Any] = {spec.name: tensor for spec, tensor in by_name.values() if spec.name}
    first = next(iter(by_name.values()))[1]
    for name, value in more.items():
        if isinstance(value, str) and value.startswith("like "):
            named[name] = named[value.removeprefix("like ")]
        elif value == "classes":
            named[name] = torch.zeros(first.shape[0], dtype=torch.long)
        else:
            named[name] = value
    return positional, named


def _input(spec: InputSpec, dtype: torch.dtype) -> torch.Tensor:
    if spec.kind == "tokens":
        return torch.zeros(spec.shape, dtype=torch.long)
    return torch.empty(spec.shape, dtype=torch.bool if spec.kind == "bools" else dtype)


def _begun(out: Any, loss: str) -> tuple[torch.Tensor, str]:
    """Where backward begins, and how that came about."""
    own = getattr(out, "loss", None)
    if isinstance(out, Mapping) and own is None:
        own = out.get("loss")
    first = own if isinstance(own, torch.Tensor) else next(_floating(out), None)
    if first is None:
        raise ModelError("the module returns no tensor of floating-point numbers: there is nothing to train on")
    if not first.requires_grad:
        raise ModelError("what the module returns needs no gradient: no parameter is trained by it")
    described = ""
    if first.numel() > 1 and loss == "cross_entropy":
        classes = first.reshape(-1, first.shape[-1])
        target = torch.zeros(classes.shape[0], dtype=torch.long)
        first = torch.nn.functional.cross_entropy(classes, target)
        described = "its output goes into a cross entropy over the last dimension"
    elif first.numel() > 1:
        described = "it returns no loss, so its backward begins with a gradient of its output's size"
    return first, described


def _floating(out: Any) -> Iterator[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        if out.is_floating_point():
            yield out
        return
    inner = out.values() if isinstance(out, Mapping) else out if isinstance(out, list | tuple) else ()
    for item in inner:
        yield from _floating(item)


@contextmanager
def _cells() -> Iterator[None]:
    """Recurrent layers cell by cell, and not as one operator of a CPU's library that no formula counts."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def on_meta() -> Iterator[None]:
    """Build without memory: what is made inside lies on the meta device."""
    with torch.device("meta"):
        yield
