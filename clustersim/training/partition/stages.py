"""Which layers every stage of a pipeline has, and which stages a rank has.

A stage here is a *global* (virtual) stage: one of ``pp * vpp`` in the order of forward.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from clustersim.core.errors import ScenarioError
from clustersim.core.model import Model
from clustersim.training.parallel import ParallelConfig, blocks_of_stages

PLACEMENTS = ("loop", "v", "both")
"""``loop``: chunk c of rank r is stage c * pp + r (Megatron's interleaving). ``v``: a rank's two chunks are r and
2 pp - 1 - r (ZBV, DualPipeV). ``both``: pp stages that two ranks hold each, r and pp - 1 - r (DualPipe)."""
LETTERS = {"embedding": "E", "block": "t", "mtp": "m", "head": "L"}
Range = tuple[int, int]


def placed(pp: int, chunks: int, placement: str) -> tuple[tuple[int, ...], ...]:
    """Global stages of each pipeline rank, by local chunk number.

    >>> placed(2, 2, "loop"), placed(2, 2, "v"), placed(2, 2, "both")
    (((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 1), (1, 0)))

    Raises :class:`ScenarioError` for an unknown placement, or one that needs two chunks.
    """
    if placement not in PLACEMENTS:
        raise ScenarioError(f"unknown placement {placement!r} of stages; known: {', '.join(PLACEMENTS)}")
    if placement == "loop":
        return tuple(tuple(c * pp + r for c in range(chunks)) for r in range(pp))
    if chunks != 2:
        raise ScenarioError(f"vpp = {chunks}: this schedule gives every rank 2 chunks; use 2 (at $.parallel.vpp)")
    last = 2 * pp - 1 if placement == "v" else pp - 1
    return tuple((r, last - r) for r in range(pp))


def split(model: Model, parallel: ParallelConfig, stages: int) -> tuple[Range, ...]:
    """Layers (first, behind the last) of every stage, as indices into ``model.layers``.

    The embedding is with the first blocks; the head, and blocks that predict further tokens, with the last ones. A
    model without blocks is split by layers.

    Raises :class:`ScenarioError` with the field where layers do not divide or a layout does not add up.
    """
    kinds = [layer.kind for layer in model.layers]
    if parallel.stages and isinstance(parallel.stages[0], str):
        return _lettered(model, tuple(str(stage) for stage in parallel.stages), stages)
    if parallel.partition_method == "parameters" and not parallel.stages:
        return _balanced([float(layer.parameters) for layer in model.layers], stages)
    if "block" not in kinds:
        return _ranges(blocks_of_stages(parallel, len(kinds), stages))
    ahead = kinds.index("block")
    body = kinds.count("block")
    counts = blocks_of_stages(parallel, body, stages)
    counts[0] += ahead
    counts[-1] += len(kinds) - ahead - body
    return _ranges(counts)


def _ranges(counts: list[int]) -> tuple[Range, ...]:
    return tuple(pairwise((0, *accumulate(counts))))


def _lettered(model: Model, texts: tuple[str, ...], stages: int) -> tuple[Range, ...]:
    """Megatron's layout: one letter per layer, in the model's order."""
    said = "".join(texts)
    has = "".join(LETTERS.get(layer.kind, "t") for layer in model.layers)
    if len(texts) != stages or said != has:
        counts = ", ".join(f"{has.count(letter)} {letter}" for letter in "Etm" if letter in has)
        raise ScenarioError(
            f"layout has {len(texts)} stages with {', '.join(f'{said.count(x)} {x}' for x in 'Etm' if x in said)}; the "
            f"pipeline has {stages} stages and the model {counts} (at $.parallel.layout)"
        )
    return _ranges([len(text) for text in texts])


def _balanced(weights: list[float], stages: int) -> tuple[Range, ...]:
    """DeepSpeed's ``partition_balanced``: consecutive parts whose heaviest is as light as can be."""
    sums = [0.0, *accumulate(weights)]
    best: list[float] = [float("inf")] * len(sums)
    best[0] = 0.0
    cuts: list[list[int]] = []
    for _ in range(stages):
        row = [float("inf")] * len(sums)
        cut = [0] * len(sums)
        for stop in range(1, len(sums)):
            for start in range(stop):
                heaviest = max(best[start], sums[stop] - sums[start])
                if heaviest < row[stop]:
                    row[stop], cut[stop] = heaviest, start
        best = row
        cuts.append(cut)
    edges = [len(weights)]
    for cut in reversed(cuts):
        edges.append(cut[edges[-1]])
    return tuple(pairwise(edges[::-1]))
