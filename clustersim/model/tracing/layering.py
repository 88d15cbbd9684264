"""Which layer every operator belongs to: repeated blocks, and what stands before and behind them.

Blocks are children of one container that are of one class and follow each other: each takes what the one before it
gave. Experts are children of one container, too, but do not; and a container of stages that are themselves mostly
blocks is opened. A module without blocks has a layer for every module that owns parameters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import torch

from clustersim.model.tracing.events import OpEvent, StepTrace


class LayerSpan(msgspec.Struct, frozen=True):
    """A layer: its ``name``, its ``kind``, and its forward events from ``first`` to before ``stop``; ``path`` of the
    module that it is, empty where it is no module's."""

    name: str
    kind: str
    first: int
    stop: int
    path: str = ""


def layers_of(module: torch.nn.Module, trace: StepTrace) -> list[LayerSpan]:
    """Layers in forward order; every forward event is in one of them."""
    blocks = sorted(_blocks(module, trace), key=lambda block: block[1])
    if not blocks:
        return _by_owner(module, trace)
    starts = [first for _, first in blocks]
    spans = []
    if starts[0] > 0:
        spans.append(LayerSpan("embedding", _first_kind(trace.events[: starts[0]]), 0, starts[0]))
    stops = [*starts[1:], _end_of(blocks[-1][0], trace)]
    spans += [LayerSpan(path, "block", first, stop, path) for (path, first), stop in zip(blocks, stops, strict=True)]
    if stops[-1] < trace.turn:
        spans.append(LayerSpan("head", "head", stops[-1], trace.turn))
    return spans


def layer_index(spans: Sequence[LayerSpan], event: int) -> int:
    """In which layer a forward event is."""
    return max(0, bisect_right([span.first for span in spans], event) - 1)


def _first_kind(events: Sequence[OpEvent]) -> str:
    return "embedding" if any(event.name == "embedding" for event in events) else "stem"


def _end_of(path: str, trace: StepTrace) -> int:
    return max(call.stop for call in trace.calls if call.path == path)


def _blocks(module: torch.nn.Module, trace: StepTrace) -> Iterator[tuple[str, int]]:
    """Paths of blocks, and the event that each begins with."""
    first: dict[str, int] = {}
    for call in trace.calls:
        first.setdefault(call.path, call.first)
    for path, container in module.named_modules():
        children = _ran(path, container, first)
        if len(children) < 2 or len({type(child) for _, child in children}) > 1:
            continue
        if any(not list(child.children()) for _, child in children):
            continue
        if _opened(path, container, trace, first) or _inside_block(path, module, trace, first):
            continue
        if _chained([name for name, _ in children], trace, first):
            for name, _ in children:
                yield name, first[name]


def _ran(path: str, container: torch.nn.Module, first: dict[str, int]) -> list[tuple[str, torch.nn.Module]]:
    """Children of a list of modules that ran, in the order in which they did."""
    if not isinstance(container, torch.nn.ModuleList | torch.nn.Sequential | torch.nn.ModuleDict):
        return []
    named = [(f"{path}.{name}" if path else name, child) for name, child in container.named_children()]
    return sorted((pair for pair in named if pair[0] in first), key=lambda pair: first[pair[0]])


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _opened(path: str, container: torch.nn.Module, trace: StepTrace, first: dict[str, int]) -> bool:
    """Whether blocks inside the children hold most of their parameters: the children are stages."""
    inner = 0
    for name, child in container.named_modules():
        if child is container:
            continue
        full = f"{path}.{name}" if path else name
        children = _ran(full, child, first)
        alike = len(children) > 1 and len({type(grandchild) for _, grandchild in children}) == 1
        composed = alike and all(list(grandchild.children()) for _, grandchild in children)
        if composed and _chained([grandchild for grandchild, _ in children], trace, first):
            inner += sum(_parameters(grandchild) for _, grandchild in children)
    return 2 * inner > _parameters(container)


def _inside_block(path: str, module: torch.nn.Module, trace: StepTrace, first: dict[str, int]) -> bool:
    """Whether a container is part of a block of an outer one."""
    parts = path.split(".")
    for depth in range(len(parts) - 1):
        outer = ".".join(parts[: depth + 1])
        container = module.get_submodule(outer)
        children = _ran(outer, container, first)
        alike = len(children) > 1 and len({type(child) for _, child in children}) == 1
        composed = alike and all(list(child.children()) for _, child in children)
        unopened = composed and not _opened(outer, container, trace, first)
        if unopened and _chained([name for name, _ in children], trace, first):
            return True
    return False


def _chained(paths: Sequence[str], trace: StepTrace, first: dict[str, int]) -> bool:
    """Whether each reads what the one before it made, or what was made of that by one operator between them."""
    stop = {call.path: call.stop for call in reversed(trace.calls)}
    for before, behind in pairwise(paths):
        made: set[int] = set()
        for event in trace.events[first[before] : stop[before]]:
            made.update(event.writes)
        for event in trace.events[stop[before] : first[behind]]:
            if made.intersection(event.reads):
                made.update(event.writes)
        if not any(made.intersection(event.graded) for event in trace.events[first[behind] : stop[behind]]):
            return False
    return True


def _by_owner(module: torch.nn.Module, trace: StepTrace) -> list[LayerSpan]:
    """A layer for each module with parameters of its own, and what follows it."""
    owners = {
        path: type(child).__name__.lower()
        for path, child in module.named_modules()
        if any(True for _ in child.parameters(recurse=False))
    }
    spans: list[LayerSpan] = []
    for index, event in enumerate(trace.events[: trace.turn]):
        if event.module in owners and (not spans or spans[-1].path != event.module):
            if spans:
                spans[-1] = msgspec.structs.replace(spans[-1], stop=index)
            start = index if spans else 0
            kind = "embedding" if owners[event.module] == "embedding" else owners[event.module]
            times = sum(span.path == event.module for span in spans)
            name = event.module or type(module).__name__
            spans.append(LayerSpan(f"{name} ({times + 1})" if times else name, kind, start, trace.turn, event.module))
    return spans or [LayerSpan(type(module).__name__, "layer", 0, trace.turn)]
