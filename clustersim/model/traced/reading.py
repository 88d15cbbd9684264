"""A model file to a Model, strictly: an unknown field, an impossible number, a reference to nothing are errors."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from clustersim.core.errors import ModelError, nearest
from clustersim.core.limits import MOST_LAYERS, counted
from clustersim.core.model import AUTOCAST, FULL, HALF, Kernel, Layer, Model, Tensor
from clustersim.core.texts import at_path, fields_of, json_table, shown, text_of
from clustersim.model.seconds.memory_bound import moves_fp32
from clustersim.model.traced.folding import tensors_of, unfolded
from clustersim.model.traced.schema import FORMAT, TYPES, VERSION, KernelRow, LayerRow, LayerWork, ModelFile


def read_traced(path: Path, types: int | None = None, samples: int = 0) -> Model:
    """The Model of a file that ``clustersim trace-model`` wrote, as it runs in types of
    :data:`~clustersim.core.model.ByteSizes`; in the first that were traced where nobody says which.

    ``samples`` : of a micro-batch, 0 where nobody knows; the model notes where it was traced with another number.
    Raises :class:`ModelError` naming file, field and value.
    """
    text = text_of(path, ModelError)
    return _model(text, str(path), types, samples)


def read_model_file(path: Path) -> ModelFile:
    """What a model file says; raises as :func:`read_traced`."""
    return _file(text_of(path, ModelError), str(path))


@lru_cache(maxsize=8)
def _model(text: str, source: str, types: int | None, samples: int = 0) -> Model:
    file = _file(text, source)
    have = [name for name in TYPES if all(name in work for work in file.works)]
    types = TYPES.index(have[0]) if types is None and have else types or HALF
    wanted = TYPES[types]
    if wanted not in have:
        raise ModelError(
            f"{source}: was traced in {' and '.join(have) or 'no types'}, not in {wanted}, which this dtype asks for; "
            f"trace it again with --types {wanted}"
        )
    works = [_work(work[wanted], types) for work in file.works]
    layers = tuple(_layer(row, *works[row.work]) for row in unfolded(file.layers))
    return Model(
        file.name,
        "traced",
        layers,
        seq_len=file.seq_len,
        sample=file.sample,
        n_blocks=sum(layer.kind == "block" for layer in layers),
        hidden=file.hidden,
        heads=file.heads,
        vocab=file.vocab,
        notes=(*_origin(file, samples), *file.notes),
        kv_heads=file.kv_heads,
        head_dim=file.head_dim,
        splits=("pp",) if file.chained else (),
    )


def _origin(file: ModelFile, samples: int) -> tuple[str, ...]:
    """Where a model is from, and what a micro-batch of another size than the traced one means."""
    origin = f"traced from {file.source} with {', '.join(file.inputs)} by torch {file.torch}"
    origin += "; a step's range is that of models that are described, none was published of a traced one"
    if samples in {0, file.batch}:
        return (origin,)
    return (
        origin,
        f"a micro-batch has {samples} samples, and {file.batch} were traced: what does not grow with them (gradients "
        "of an embedding, masks) is taken to grow; trace that many for exact bytes",
    )


@lru_cache(maxsize=8)
def _file(text: str, source: str) -> ModelFile:
    table = json_table(text, source, ModelError)
    if table.get("format") != FORMAT:
        raise ModelError(
            f"{source}: is no model file: its 'format' is {shown(table.get('format'))}, not {FORMAT!r}; "
            "`clustersim trace-model` writes one, and a Hugging Face config.json is hf_config (at $.format)"
        )
    if table.get("version") != VERSION:
        raise ModelError(
            f"{source}: its version is {shown(table.get('version'))}, and {VERSION} is read; trace the model again "
            "(at $.version)"
        )
    try:
        file = msgspec.convert(table, ModelFile)
    except msgspec.ValidationError as wrong:
        raise ModelError(f"{source}: {_explained(str(wrong), table)}") from None
    _check(file, source)
    return file


def _explained(message: str, table: dict[str, Any]) -> str:
    """msgspec's message with the value and the nearest field."""
    problem, _, tail = message.partition(" - at `$")
    path = tail.rstrip("`")
    value, kind = at_path(table, ModelFile, path)
    if problem.startswith("Object contains unknown field"):
        name = problem.split("`")[1]
        return f"unknown field {name!r}; {nearest(name, fields_of(kind) or ['nothing'])} (at ${path}.{name})"
    place = f"(at ${path})"
    return f"{problem[:1].lower()}{problem[1:]} {place}" if value is None else f"{shown(value)}: {problem} {place}"


def _check(file: ModelFile, source: str) -> None:
    """Raise :class:`ModelError` where parts of a file do not fit each other."""
    counted(sum(row.count for row in file.layers), MOST_LAYERS, f"{source}: layers", ModelError)
    if not file.layers:
        raise ModelError(f"{source}: has no layer; trace the model again (at $.layers)")
    for i, row in enumerate(file.layers):
        if row.work >= len(file.works):
            raise ModelError(
                f"{source}: work {row.work} is not among the {len(file.works)} of the file (at $.layers[{i}].work)"
            )
        names = (row.name, *(tensor.name for tensor in row.tensors))
        if row.count > 1 and not all("{}" in name for name in names):
            raise ModelError(f"{source}: {row.count} layers would have one name: braces are missing (at $.layers[{i}])")
    rows = list(tensors_of(unfolded(file.layers)))
    times = Counter(row.name for row in rows)
    repeated = next((name for name, count in times.items() if count > 1), None)
    if repeated is not None:
        raise ModelError(f"{source}: the tensor {shown(repeated)} is there twice; say it once (at $.layers)")
    for tensor in rows:
        name = shown(tensor.name)
        if tensor.numel % tensor.width:
            raise ModelError(f"{source}: {name}: {tensor.numel} elements are no rows of {tensor.width} (at $.layers)")
        if tensor.tied_to and tensor.tied_to not in times:
            raise ModelError(f"{source}: {name} is tied to {shown(tensor.tied_to)}, which is no tensor (at $.layers)")


def _work(work: LayerWork, types: int) -> tuple[tuple[Kernel, ...], float]:
    kernels = tuple(_kernel(row, types) for row in work.kernels)
    return kernels, work.boundary / (2.0 if types == HALF else 4.0)


def _kernel(row: KernelRow, types: int) -> Kernel:
    """The kernel, with elements of the size by which it is priced."""
    wide = types == FULL or row.fp32 or (types == AUTOCAST and row.kind == "memory" and moves_fp32(row.name))
    element = 4.0 if wide else 2.0
    return Kernel(
        row.name,
        row.kind,
        m=row.m,
        n=row.n,
        k=row.k,
        batch=row.batch,
        flops=row.flops,
        backward_flops=row.backward_flops,
        nbytes=row.nbytes / element,
        backward_nbytes=row.backward_nbytes / element,
        groups=row.groups,
        heads=row.heads,
        head_dim=row.head_dim,
        seq=row.seq,
        causal=row.causal,
        fp32=row.fp32,
        flash=row.flash,
        launches=row.launches,
        backward_launches=row.backward_launches,
        cut="whole",
        repeat=row.repeat,
        saved=row.kept / (4.0 if types == FULL else 2.0),
        kept=(row.kept, row.kept, row.kept),
        working=(row.working, row.working, row.working),
    )


def _layer(row: LayerRow, kernels: tuple[Kernel, ...], boundary: float) -> Layer:
    return Layer(
        row.name,
        row.kind,
        tuple(Tensor(tensor.name, tensor.numel, tensor.tied_to, "whole", tensor.width) for tensor in row.tensors),
        kernels,
        buffers=row.buffers,
        activation_bytes=float(sum(kernel.saved for kernel in kernels)),
        boundary_bytes=boundary,
    )
