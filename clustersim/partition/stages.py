"""Which layers every stage of a pipeline has, and which stages a rank has.

A stage here is a *global* (virtual) stage: one of ``pp * vpp`` in the order of forward.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from clustersim.errors import ScenarioError
from clustersim.model import Layer, Model
from clustersim.parallel import ParallelConfig

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
    if "block" not in kinds:
        counts = _counts(parallel, len(kinds), stages) if not _even(len(kinds), stages) else None
        return _ranges(counts or _even(len(kinds), stages))
    if parallel.stages and isinstance(parallel.stages[0], str):
        return _lettered(model, tuple(str(stage) for stage in parallel.stages), stages)
    if parallel.partition_method == "parameters":
        return _balanced([float(layer.parameters) for layer in model.layers], stages)
    ahead, body = kinds.index("block"), kinds.count("block")
    counts = _counts(parallel, body, stages)
    counts[0] += ahead
    counts[-1] += len(kinds) - ahead - body
    return _ranges(counts)


def _ranges(counts: list[int]) -> tuple[Range, ...]:
    return tuple(pairwise((0, *accumulate(counts))))


def _counts(parallel: ParallelConfig, layers: int, stages: int) -> list[int]:
    """Blocks of every stage, by what the configuration says."""
    if parallel.stages:
        given = [int(stage) for stage in parallel.stages]
        if len(given) != stages or sum(given) != layers:
            raise ScenarioError(
                f"layout has {len(given)} stages of {sum(given)} layers together; the pipeline has {stages} stages and "
                f"the model {layers} layers (at $.parallel.layout)"
            )
        return given
    if parallel.first_stage_less_layers is not None or parallel.last_stage_less_layers is not None:
        return weighted(layers, stages, parallel.first_stage_less_layers or 0, parallel.last_stage_less_layers or 0)
    if parallel.partition_method == "uniform":
        return uniform(layers, stages)
    return _megatron(parallel, layers, stages)


def _even(layers: int, stages: int) -> list[int]:
    return [layers // stages] * stages if layers % stages == 0 else []


def weighted(layers: int, stages: int, first_less: int, last_less: int) -> list[int]:
    """torchtitan's split: embedding and head weigh so many layers, and the first stages take what is left over.

    torchtitan distributed/pipeline_parallel.py ``generate_llm_fqn_per_model_part``.

    >>> weighted(32, 4, 1, 1)
    [8, 9, 8, 7]
    """
    each, extra = divmod(layers + first_less + last_less, stages)
    counts = [each + (stage < extra) for stage in range(stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    if min(counts) < 0:
        raise ScenarioError(
            f"first_stage_less_layers = {first_less} and last_stage_less_layers = {last_less} leave a stage of "
            f"{layers} layers in {stages} stages with less than none (at $.parallel.first_stage_less_layers)"
        )
    return counts


def uniform(layers: int, stages: int) -> list[int]:
    """DeepSpeed's ``partition_uniform``: the first stages take one layer more where they do not divide.

    >>> uniform(10, 4)
    [3, 3, 2, 2]
    """
    each, extra = divmod(layers, stages)
    return [each + (stage < extra) for stage in range(stages)]


def _megatron(parallel: ParallelConfig, layers: int, stages: int) -> list[int]:
    """Equal ranks but for given first and last ones; embedding and loss may count as a layer each.

    Megatron-LM transformer/transformer_block.py ``get_num_layers_to_build``: a rank's layers are divided over its
    chunks, and chunk c of all ranks precedes chunk c + 1 of any.
    """
    p = parallel.pp
    vpp = max(1, stages // p)
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    counted = (
        parallel.account_for_embedding_in_pipeline_split,
        parallel.account_for_loss_in_pipeline_split,
    )
    rest = layers + sum(counted) - (first or 0) - (last or 0)
    between = p - (first is not None) - (last is not None)
    if (between and rest % (between * vpp)) or (not between and rest) or any((n or 0) % vpp for n in (first, last)):
        raise ScenarioError(
            f"pp = {p}: {rest} layers do not divide over {between} ranks of {vpp} chunks; say a layout, or "
            "first_stage_less_layers = 1 and last_stage_less_layers = 1 for uneven stages (at $.parallel.pp)"
        )
    each = rest // (between * vpp) if between else 0
    chunk = [each] * p
    if first is not None:
        chunk[0] = first // vpp
    if last is not None:
        chunk[-1] = last // vpp
    counts = chunk * vpp
    counts[0] -= counted[0]
    counts[-1] -= counted[1]
    return counts


def _lettered(model: Model, texts: tuple[str, ...], stages: int) -> tuple[Range, ...]:
    """Megatron's layout: one letter per layer, in the model's order."""
    said, has = "".join(texts), "".join(_letter(layer) for layer in model.layers)
    if len(texts) != stages or said != has:
        counts = ", ".join(f"{has.count(letter)} {letter}" for letter in "Etm" if letter in has)
        raise ScenarioError(
            f"layout has {len(texts)} stages with {', '.join(f'{said.count(x)} {x}' for x in 'Etm' if x in said)}; the "
            f"pipeline has {stages} stages and the model {counts} (at $.parallel.layout)"
        )
    return _ranges([len(text) for text in texts])


def _letter(layer: Layer) -> str:
    return LETTERS.get(layer.kind, "t")


def _balanced(weights: list[float], stages: int) -> tuple[Range, ...]:
    """DeepSpeed's ``partition_balanced``: consecutive parts whose heaviest is as light as can be."""
    sums = [0.0, *accumulate(weights)]
    best: list[float] = [float("inf")] * len(sums)
    best[0] = 0.0
    cuts: list[list[int]] = []
    for _ in range(stages):
        row, cut = [float("inf")] * len(sums), [0] * len(sums)
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
