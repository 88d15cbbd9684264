"""A traced module to a model file: its tensors by layer, what its layers do in each type, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch

from clustersim.core.errors import ModelError, few
from clustersim.core.model import Layer, Model, Tensor
from clustersim.model.traced import LayerRow, LayerWork, ModelFile, TensorRow, folded
from clustersim.model.traced.schema import TypesName
from clustersim.model.tracing.events import AttentionShape, StepTrace
from clustersim.model.tracing.inputs import InputSpec, batch_of
from clustersim.model.tracing.kernels import works_of
from clustersim.model.tracing.layering import LayerSpan, layer_index, layers_of
from clustersim.model.tracing.step import TracedStep

_TOLD = 3
"""Names that a note lists."""


class TypedLayers(msgspec.Struct, frozen=True):
    """What a step in one setting of types came to: ``rows`` of layers without work, the ``works`` of each, whether they
    are ``chained``, and further ``notes``."""

    rows: tuple[LayerRow, ...]
    works: tuple[LayerWork, ...]
    chained: bool
    notes: tuple[str, ...]


class TracedSource(msgspec.Struct, frozen=True):
    """What was traced: its ``name``, the words of the command, its ``inputs``, and what is ``left_out``."""

    name: str
    words: str
    inputs: tuple[InputSpec, ...]
    left_out: tuple[str, ...] = ()


def typed_layers(module: torch.nn.Module, step: TracedStep, batch: int, types: TypesName) -> TypedLayers:
    """The layers of a step."""
    trace = step.trace
    spans = layers_of(module, trace)
    home = _homes(module, trace, spans)
    tensors, unused = _tensors(module, trace, spans, home)
    buffers = _buffers(module, home, len(spans))
    rows = tuple(
        LayerRow(name=span.name, kind=span.kind, work=0, tensors=tuple(own), buffers=count)
        for span, own, count in zip(spans, tensors, buffers, strict=True)
    )
    work = works_of(trace, spans, batch, _gradients(rows), types)
    chained = all(len(numbers) <= 1 for numbers in work.crossing)
    notes = (
        [f"{len(unused)} parameters get no gradient, of which no use was seen: {few(unused, _TOLD)}"] if unused else []
    )
    if step.loss:
        notes.append(step.loss)
    if step.checkpointed:
        notes.append(
            f"its own activation checkpointing ({few(step.checkpointed, _TOLD)}) was left out: "
            "activation_checkpointing of the scenario says what is computed again"
        )
    if step.uncounted:
        notes.append(
            f"{few(step.uncounted, _TOLD)}: of their FLOPs nothing is known; they take the time of their bytes"
        )
    notes.extend(
        f"attention runs as products and a softmax, since no fused kernel takes it: {reason}" for reason in step.unfused
    )
    wide = dict.fromkeys(row.name for work in work.works for row in work.kernels if row.fp32)
    if wide:
        notes.append(f"{few(wide, _TOLD)}: run in fp32 among others of 16 bits (TF32 where a run sets it is faster)")
    recurrent = _modules_of(module, torch.nn.RNNBase)
    if recurrent:
        notes.append(f"{few(recurrent, _TOLD)}: cells are traced one by one, where cuDNN joins them")
    synced = _modules_of(module, torch.nn.SyncBatchNorm)
    if synced:
        notes.append(
            f"{few(synced, _TOLD)}: what SyncBatchNorm exchanges between GPUs, forward and backward, is not played"
        )
    return TypedLayers(rows, work.works, chained, tuple(notes))


def _modules_of(module: torch.nn.Module, kind: type[torch.nn.Module]) -> list[str]:
    """Names of the modules of a kind within a module."""
    return [name for name, child in module.named_modules() if isinstance(child, kind)]


def model_file(
    module: torch.nn.Module, source: TracedSource, typed: Mapping[TypesName, TypedLayers], trace: StepTrace
) -> ModelFile:
    """The file of layers in one setting of types or more. Raises :class:`ModelError` where their layers differ."""
    first = next(iter(typed.values()))
    for types, layers in typed.items():
        if layers.rows != first.rows:
            raise ModelError(
                f"{source.words}: its layers under {types} are others than under {next(iter(typed))}; trace each by "
                "itself with --types"
            )
    rows, works = _shared_works(first.rows, typed)
    notes = dict.fromkeys(note for layers in typed.values() for note in layers.notes)
    tokens = source.inputs[0]
    attentions = [event.shape for event in trace.events if isinstance(event.shape, AttentionShape)]
    batch = batch_of(source.inputs)
    head = attentions[0] if attentions else AttentionShape(0, 0, 0, 0, False)
    return ModelFile(
        format="clustersim-model",
        version=1,
        name=source.name,
        source=source.words,
        torch=str(torch.__version__),
        inputs=tuple(map(str, source.inputs)),
        batch=batch,
        sample={"tokens": "sequence", "images": "image"}.get(tokens.kind, "clip"),  # type: ignore[arg-type]
        seq_len=_seq_len(tokens, head, works),
        hidden=_hidden(module) if tokens.kind == "tokens" else 0,
        heads=round(head.heads / batch),
        kv_heads=round(head.kv_heads / batch),
        head_dim=head.head_dim,
        vocab=_vocabulary(module) if tokens.kind == "tokens" else 0,
        chained=all(layers.chained for layers in typed.values()),
        notes=(*notes, *source.left_out),
        layers=folded(rows),
        works=tuple(works),
    )


def _shared_works(
    layer_rows: Sequence[LayerRow], typed: Mapping[TypesName, TypedLayers]
) -> tuple[list[LayerRow], list[dict[TypesName, LayerWork]]]:
    """Each layer with the number of its work, and the works, each once."""
    places: dict[bytes, int] = {}
    works: list[dict[TypesName, LayerWork]] = []
    rows = []
    for i, row in enumerate(layer_rows):
        work = {types: layers.works[i] for types, layers in typed.items()}
        key = msgspec.json.encode(work)
        if key not in places:
            places[key] = len(works)
            works.append(work)
        rows.append(msgspec.structs.replace(row, work=places[key]))
    return rows, works


def _seq_len(first: InputSpec, head: AttentionShape, works: Sequence[Mapping[TypesName, LayerWork]]) -> int:
    """Tokens of a sample; of images what attention sees, else rows of the first product behind the first layer; and
    none of a network whose work is in convolutions."""
    if first.kind != "images":
        return first.shape[1] if len(first.shape) > 1 else 0
    kernels = [kernel for work in works for kernel in next(iter(work.values())).kernels]
    convolved = sum(kernel.flops for kernel in kernels if kernel.kind == "conv")
    if 2.0 * convolved > sum(kernel.flops for kernel in kernels):
        return 0
    return head.seq or next((kernel.m for kernel in kernels if kernel.kind == "gemm" and not kernel.batch), 0)


def _tables(module: torch.nn.Module) -> list[torch.nn.Embedding]:
    return [child for child in module.modules() if isinstance(child, torch.nn.Embedding)]


def _hidden(module: torch.nn.Module) -> int:
    return max((int(table.embedding_dim) for table in _tables(module)), default=0)


def _vocabulary(module: torch.nn.Module) -> int:
    return max((int(table.num_embeddings) for table in _tables(module)), default=0)


def _homes(module: torch.nn.Module, trace: StepTrace, spans: Sequence[LayerSpan]) -> dict[str, int]:
    """Layer of every module by its path: its block, where it ran first, or where the module around it is."""
    paths = {span.path: place for place, span in enumerate(spans) if span.path}
    first: dict[str, int] = {}
    for call in trace.calls:
        first.setdefault(call.path, call.first)
    homes = {}
    for path, _ in module.named_modules():
        parts = path.split(".")
        above = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
        block = next((paths[name] for name in above if name in paths), None)
        if block is not None:
            homes[path] = block
        else:
            ran = next((first[name] for name in above if name in first), 0)
            homes[path] = layer_index(spans, ran)
    return homes


def _tensors(
    module: torch.nn.Module, trace: StepTrace, spans: Sequence[LayerSpan], home: Mapping[str, int]
) -> tuple[list[list[TensorRow]], list[str]]:
    """Parameters of every layer in registration order, each where it is first used; and those that are not used."""
    used: dict[str, int] = {}
    for index, event in enumerate(trace.events[: trace.turn]):
        for number in event.reads:
            memory = trace.memories[number]
            if memory.kind == "weight":
                for name in memory.weights:
                    used.setdefault(name, index)
    layers: list[list[TensorRow]] = [[] for _ in spans]
    names: dict[int, str] = {}
    unused = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = home[name.rpartition(".")[0]]
        width = int(parameter.numel() // parameter.shape[0]) if parameter.dim() > 1 else 1
        tied = names.setdefault(id(parameter), name)
        row = TensorRow(name=name, numel=int(parameter.numel()), width=width, tied_to=tied if tied != name else "")
        place = layer_index(spans, used[name]) if name in used and spans[owner].kind != "block" else owner
        layers[place].append(row)
        if not row.tied_to and name not in used:
            unused.append(name)
    return layers, unused


def _buffers(module: torch.nn.Module, home: Mapping[str, int], count: int) -> list[int]:
    """Elements of floating-point buffers by layer."""
    elements = [0] * count
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            elements[home[name.rpartition(".")[0]]] += int(buffer.numel())
    return elements


def _gradients(rows: Iterable[LayerRow]) -> list[float]:
    """Elements of gradients by the layer whose backward makes them first."""
    layers = tuple(
        Layer(row.name, row.kind, tuple(Tensor(t.name, t.numel, t.tied_to, width=t.width) for t in row.tensors), ())
        for row in rows
    )
    return [float(count) for count in Model("", "", layers).gradients]
