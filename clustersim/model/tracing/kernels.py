"""Events of a trace to rows of kernels: what each does forward and backward, keeps, and holds while its backward runs.

Bandwidth-bound operators of one module that run one after the other are one row, as a norm written out in seven
operators is; products, convolutions and fused attention have a row each, and what else their backward does (a bias's
gradient, a copy) has another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from clustersim.model.traced.schema import KernelRow, LayerWork, TypesName
from clustersim.model.tracing.events import AttentionShape, ConvolutionShape, Memory, OpEvent, Product, StepTrace
from clustersim.model.tracing.layering import LayerSpan
from clustersim.model.tracing.traffic import CONVOLUTIONS, PRODUCTS

SCORE_NAMES = {"_softmax": "softmax", "mul": "scale", "div": "scale", "add": "mask", "native_dropout": "dropout"}
"""Operators over scores of attention, by the names that their rate goes by."""
HEAVY = PRODUCTS | CONVOLUTIONS


@dataclass
class _Group:
    """Events that become one row, or two: forward ones, and those of backward that follow from them."""

    ahead: list[OpEvent]
    back: list[tuple[int, OpEvent]] = field(default_factory=list)
    kept: float = 0.0
    busiest: float | None = None

    @property
    def event(self) -> OpEvent:
        """The first that costs something, else the first."""
        return next((event for event in self.ahead if event.launches), self.ahead[0])


class TracedWork(msgspec.Struct, frozen=True):
    """What every layer does. ``crossing`` : memories that need a gradient and go into each layer from those before it.
    ``works`` : by layer."""

    works: tuple[LayerWork, ...]
    crossing: tuple[tuple[int, ...], ...]


def works_of(
    trace: StepTrace, spans: Sequence[LayerSpan], batch: int, gradients: Sequence[float], types: TypesName
) -> TracedWork:
    """Rows of kernels of every layer.

    Parameters
    ----------
    batch : samples that were traced. gradients : elements of parameters' gradients by layer, those of a tied one where
    backward makes them first. types : under autocast, copies of weights are left out, which are priced and counted by
    the weights themselves (:func:`clustersim.model.seconds.price.cast_time`).
    """
    element = 2.0 if types == "bf16" else 4.0
    if types != "autocast":
        for memory in trace.memories:
            memory.kind = "activation" if memory.kind == "cast" else memory.kind
    groups, home = _grouped(trace, spans)
    _add_backward(trace, groups, home)
    _add_kept(trace, groups, home)
    crossing = _crossing(trace, spans)
    boundaries = [sum(nbytes.values()) for nbytes in crossing]
    _add_working(trace, groups, boundaries, _Gradients(gradients, element))
    works = []
    for layer, boundary in zip(groups, boundaries, strict=True):
        rows = [row for group in layer if not _casts(trace, group) for row in _rows(group, batch, types)]
        works.append(LayerWork(kernels=tuple(rows), boundary=_rounded(boundary / batch)))
    return TracedWork(tuple(works), tuple(tuple(nbytes) for nbytes in crossing))


Groups = list[list[_Group]]
Home = dict[int, _Group]
"""Forward event -> the group that it is in."""


def _grouped(trace: StepTrace, spans: Sequence[LayerSpan]) -> tuple[Groups, Home]:
    """Forward events of each layer in groups; operators that cost nothing are alone until their backward costs."""
    groups: Groups = []
    home: Home = {}
    for span in spans:
        layer: list[_Group] = []
        last: _Group | None = None
        for index in range(span.first, span.stop):
            event = trace.events[index]
            cast = any(trace.memories[number].kind == "cast" for number in event.writes)
            if last is not None and event.launches and not cast and _joins(last, event):
                last.ahead.append(event)
                home[index] = last
                continue
            group = home[index] = _Group([event])
            layer.append(group)
            last = group if event.launches and not cast else last
        groups.append(layer)
    return groups, home


def _joins(group: _Group, event: OpEvent) -> bool:
    """Whether a bandwidth-bound operator is of the same module as the group before it."""
    before = group.event
    if before.shape is not None or event.shape is not None or event.scores or before.scores:
        return False
    return before.module == event.module and (event.leaf or not (event.sums or before.sums))


def _casts(trace: StepTrace, group: _Group) -> bool:
    """Whether it makes a copy of weights and nothing else."""
    return all(trace.memories[number].kind == "cast" for event in group.ahead for number in event.writes)


def _add_backward(trace: StepTrace, groups: Groups, home: Home) -> None:
    """Every event of backward goes to the forward event that made its node; what accumulates gradients, to the node
    that ran before."""
    last = next((group for layer in reversed(groups) for group in reversed(layer)), None)
    for index in range(trace.turn, len(trace.events)):
        event = trace.events[index]
        group = home.get(trace.owners.get(event.node, -1), last)
        if group is not None:
            group.back.append((index, event))
            last = group


def _add_kept(trace: StepTrace, groups: Groups, home: Home) -> None:
    """What is there when backward begins belongs to the operator that first kept it, else to that which made it."""
    for memory in trace.memories:
        lives = memory.born is not None and memory.born < trace.turn
        if not (memory.kind == "activation" and lives) and not _is_kept_input(memory):
            continue
        if memory.died is not None and memory.died <= trace.turn:
            continue
        owner = trace.owners.get(memory.keeper, memory.born)
        group = home.get(-1 if owner is None else owner)
        if group is not None:
            group.kept += memory.nbytes


def _is_kept_input(memory: Memory) -> bool:
    """Whether it came in and is kept for backward: pixels, which weights' gradients need."""
    return memory.kind == "input" and memory.keeper >= 0


def _crossing(trace: StepTrace, spans: Sequence[LayerSpan]) -> list[dict[int, float]]:
    """Of every layer, bytes by memory that need a gradient, were made before it, and are read in it or behind it; of
    the first one, of the numbers that come in."""
    into: list[dict[int, float]] = [{} for _ in spans]
    made: dict[int, int] = {}
    for place, span in enumerate(spans):
        for event in trace.events[span.first : span.stop]:
            for number, nbytes in event.graded.items():
                if trace.memories[number].kind != "activation" or number not in made:
                    continue
                for later in range(made[number] + 1, place + 1):
                    into[later][number] = max(nbytes, into[later].get(number, 0.0))
            for number in event.writes:
                made.setdefault(number, place)
    return into


@dataclass
class _Gradients:
    """Elements of gradients by layer, and bytes of one."""

    elements: Sequence[float]
    element: float

    def from_layer(self, place: int) -> float:
        """Bytes of gradients of a layer and of all behind it."""
        return self.element * sum(self.elements[place:])


def _add_working(trace: StepTrace, groups: Groups, boundaries: Sequence[float], gradients: _Gradients) -> None:
    """The fullest moment of each group's backward, beside what is kept up to it, its layer's gradient, and gradients
    of parameters that are there by :func:`clustersim.training.memory.layer_bytes`."""
    alive = _alive(trace)
    kept = 0.0
    for place, layer in enumerate(groups):
        missing = gradients.element * sum(map(_weights, layer))
        before = []
        for group in layer:
            kept += group.kept
            before.append(kept)
        for group, left in zip(reversed(layer), reversed(before), strict=True):
            there = gradients.from_layer(place) - min(missing, gradients.element * gradients.elements[place])
            peak = max((alive[index] for index, _ in group.back), default=None)
            if peak is not None:
                group.busiest = max(0.0, peak - left - boundaries[place] - there)
            missing -= gradients.element * _weights(group)


def _alive(trace: StepTrace) -> list[float]:
    """Bytes of activations and gradients at every event."""
    change = defaultdict[int, float](float)
    for memory in trace.memories:
        kept_input = _is_kept_input(memory)
        if not kept_input and (memory.kind not in {"activation", "gradient"} or memory.born is None):
            continue
        change[memory.born or 0] += memory.nbytes
        if memory.died is not None:
            change[memory.died] -= memory.nbytes
    total = 0.0
    course = []
    for index in range(len(trace.events)):
        total += change[index]
        course.append(total)
    return course


def _weights(group: _Group) -> float:
    """Elements of the weights of a product, as :func:`clustersim.training.memory.weights` counts them."""
    shape = group.event.shape
    if not isinstance(shape, Product) or _batch(shape):
        return 0.0
    return float(shape.n * shape.k * (shape.batch if shape.weight >= 0 else 1))


def _batch(shape: Product) -> int:
    """Independent products of activations; 0 for a product with weights, and for one that is alone."""
    return shape.batch if shape.weight < 0 and shape.batch > 1 else 0


def _rows(group: _Group, batch: int, types: TypesName) -> list[KernelRow]:
    """The rows of a group; none where nothing of it costs anything."""
    shape = group.event.shape
    back = [event for _, event in group.back]
    heavy = [event for event in back if event.name in HEAVY or event.name == "attention_backward"] if shape else []
    rest = [event for event in back if event.launches and event not in heavy]
    name = _name(group)
    keeps = {"kept": _rounded(group.kept / batch), "working": _rounded((group.busiest or 0.0) / batch)}
    if shape is None:
        row = KernelRow(name=name, kind="memory", launches=_launches(group.ahead), backward_launches=_launches(rest))
        row = msgspec.structs.replace(row, **_moved(group.ahead, rest, batch), **keeps)
        return [row] if row.launches or row.backward_launches or row.kept else []
    row = msgspec.structs.replace(
        _shaped(name, shape, batch),
        launches=group.event.launches,
        backward_launches=_launches(heavy),
        flops=group.event.flops / batch,
        fp32=group.event.full and types != "fp32",
        backward_flops=sum(event.flops for event in heavy) / batch,
        **_moved([group.event], heavy, batch),
        **keeps,
    )
    if isinstance(shape, ConvolutionShape):
        row = _convolved(row, shape, group.event, batch)
    if not rest:
        return [row]
    more = KernelRow(name=f"{name}_gradients", kind="memory", launches=0, backward_launches=_launches(rest))
    return [row, msgspec.structs.replace(more, **_moved([], rest, batch))]


def _moved(ahead: Sequence[OpEvent], back: Sequence[OpEvent], batch: int) -> Mapping[str, float]:
    return {
        "nbytes": _rounded(sum(event.nbytes for event in ahead) / batch),
        "backward_nbytes": _rounded(sum(event.nbytes for event in back) / batch),
    }


def _launches(events: Sequence[OpEvent]) -> int:
    return sum(event.launches for event in events)


def _rounded(nbytes: float) -> float:
    """Bytes to the hundredth: what does not divide by the samples has no end."""
    return round(nbytes, 2)


def _shaped(name: str, shape: Product | ConvolutionShape | AttentionShape, batch: int) -> KernelRow:
    """A row of this shape, for one sample."""
    if isinstance(shape, AttentionShape):
        heads = max(1, round(shape.heads / batch))
        return KernelRow(
            name=name,
            kind="attention",
            heads=heads,
            head_dim=shape.head_dim,
            seq=shape.seq,
            causal=shape.causal,
            flash=shape.flash,
        )
    if isinstance(shape, ConvolutionShape):
        rows = max(1, round(shape.m / batch))
        return KernelRow(name=name, kind="conv", m=rows, n=shape.n, k=shape.k, groups=shape.groups)
    each = _batch(shape)
    if each and each % batch == 0:
        return KernelRow(name=name, kind="gemm", m=shape.m, n=shape.n, k=shape.k, batch=each // batch)
    # Weights on the left: the product of the transposes has them on the right.
    m, n = (shape.n, shape.m) if shape.weight == 0 else (shape.m, shape.n)
    repeat = shape.batch if shape.weight >= 0 else 1
    m *= 1 if shape.weight >= 0 else shape.batch
    return KernelRow(name=name, kind="gemm", m=max(1, round(m / batch)), n=n, k=shape.k, repeat=repeat)


def _convolved(row: KernelRow, shape: ConvolutionShape, event: OpEvent, batch: int) -> KernelRow:
    """A convolution moves its input and its output, and once more for every gradient."""
    out = shape.m * shape.n * shape.groups
    element = 4.0 if event.nbytes >= 4.0 * shape.moved else 2.0
    moved = element * shape.moved / batch if out else 0.0
    return msgspec.structs.replace(row, nbytes=_rounded(moved), backward_nbytes=_rounded(row.backward_launches * moved))


def _name(group: _Group) -> str:
    """Of a module inside the layer, or of the operator."""
    event = group.event
    if event.name == "attention":
        return "attention"
    if event.scores and event.shape is None:
        return SCORE_NAMES.get(event.name, event.name)
    own = event.module.rpartition(".")[2] if event.leaf else ""
    if event.shape is not None:
        return own or {"bmm": "product", "mm": "product", "addmm": "product"}.get(event.name, event.name)
    if event.sums and not event.leaf:
        return "residual_sum"
    names = list(dict.fromkeys(item.name.strip("_") for item in group.ahead if item.launches)) or [
        event.name.strip("_")
    ]
    if any("norm" in name for name in names):
        return next(name for name in names if "norm" in name)
    if own and not own.isdigit():
        return own
    return names[0] if len(names) == 1 else f"{names[0]}_and_{len(group.ahead) - 1}_more"
