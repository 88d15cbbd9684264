"""Which layers every stage of a pipeline has, and which stages a rank has.

A stage here is a *global* (virtual) stage: one of ``pp * vpp`` in the order of forward.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from clustersim.core.errors import ScenarioError
from clustersim.core.model import Layer, Model
from clustersim.model.seconds.kernels import weighted
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
    if parallel.partition_method == "compute" and not parallel.stages:
        return _filled(_by_compute([_products(model, layer) for layer in model.layers], stages))
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


def _products(model: Model, layer: Layer) -> float:
    """What nanotron counts of a layer (``get_block_compute_costs`` of its models): the weights of its products, a
    query, a key and a value as wide as all heads; nothing of an embedding or a norm."""
    products = [kernel for kernel in layer.kernels if kernel.kind == "gemm" and weighted(kernel)]
    weights = float(sum(kernel.n * kernel.k for kernel in products))
    if layer.kind != "block" or not model.kv_heads:
        return weights
    repeated = (layer.heads or model.heads) - (layer.kv_heads or model.kv_heads)
    return weights + 2.0 * repeated * model.head_dim * model.hidden


def _by_compute(costs: list[float], stages: int) -> list[int]:
    """Layers of each stage as nanotron's ``build_model`` has them (models/base.py): a stage ends behind the layer with
    which all so far cost *more* than its share.

    >>> _by_compute([0.0, *[1.0] * 16, 4.0], 4)
    [7, 5, 5, 1]
    """
    counts = [0] * stages
    share = sum(costs) / stages
    stage = 0
    so_far = 0.0
    for cost in costs:
        counts[stage] += 1
        so_far += cost
        if stage < stages - 1 and so_far > share * (stage + 1):
            stage += 1
    return counts


def _filled(counts: list[int]) -> tuple[Range, ...]:
    """Ranges without an empty stage: nanotron leaves the last one the loss alone where the head outweighs a share. Its
    head is here with the loss, and each stage without a layer gets the last one of those before it."""
    filled = list(counts)
    for stage in range(len(filled) - 1, 0, -1):
        while not filled[stage]:
            giver = max(i for i in range(stage) if filled[i])
            filled[giver] -= 1
            filled[stage] += 1
    return _ranges(filled)
