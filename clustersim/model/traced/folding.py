"""Layers that are equal but for a number in their names, written once; and unfolded again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from clustersim.model.traced.schema import LayerRow, TensorRow

_NUMBER = re.compile(r"\d+")


def folded(layers: Sequence[LayerRow]) -> tuple[LayerRow, ...]:
    """Runs of consecutive layers with one work, whose names count up, as one row each.

    >>> rows = [LayerRow(name=f"h.{i}", kind="block", work=1) for i in range(3)]
    >>> [(row.name, row.count) for row in folded(rows)]
    [('h.{}', 3)]
    """
    runs: list[LayerRow] = []
    for layer in layers:
        grown = _grown(runs[-1], layer) if runs else None
        if grown is None:
            runs.append(layer)
        else:
            runs[-1] = grown
    return tuple(runs)


def _grown(run: LayerRow, layer: LayerRow) -> LayerRow | None:
    """The run with one more layer behind it; None where the layer does not continue it."""
    if run.count == 1:
        for place in _NUMBER.finditer(run.name):
            pattern = _with_braces(run, run.name[: place.start()], place.group())
            if _numbered(pattern, int(place.group()) + 1) == layer:
                return msgspec.structs.replace(pattern, count=2, first=int(place.group()))
        return None
    if _numbered(run, run.first + run.count) == layer:
        return msgspec.structs.replace(run, count=run.count + 1)
    return None


def _with_braces(layer: LayerRow, before: str, number: str) -> LayerRow:
    """The layer with braces for the number that follows ``before`` in its name and in its tensors' names."""
    prefix = before + number

    def braced(name: str) -> str:
        """A name with braces for its number."""
        follows = name.startswith(prefix) and not name[len(prefix) :][:1].isdigit()
        return f"{before}{{}}{name[len(prefix) :]}" if follows else name

    tensors = tuple(
        msgspec.structs.replace(tensor, name=braced(tensor.name), tied_to=braced(tensor.tied_to))
        for tensor in layer.tensors
    )
    return msgspec.structs.replace(layer, name=braced(layer.name), tensors=tensors)


def _numbered(pattern: LayerRow, number: int) -> LayerRow:
    tensors = tuple(
        msgspec.structs.replace(
            tensor,
            name=tensor.name.replace("{}", str(number)),
            tied_to=tensor.tied_to.replace("{}", str(number)),
        )
        for tensor in pattern.tensors
    )
    name = pattern.name.replace("{}", str(number))
    return msgspec.structs.replace(pattern, name=name, tensors=tensors, count=1, first=0)


def unfolded(layers: Iterable[LayerRow]) -> Iterator[LayerRow]:
    """Every layer by itself."""
    for layer in layers:
        if layer.count == 1:
            yield layer
        else:
            for number in range(layer.first, layer.first + layer.count):
                yield _numbered(layer, number)


def tensors_of(layers: Iterable[LayerRow]) -> Iterator[TensorRow]:
    """Tensors of layers in order."""
    for layer in layers:
        yield from layer.tensors
