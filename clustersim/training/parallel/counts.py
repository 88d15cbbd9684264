"""How many layers every stage of a pipeline has, by whichever framework's rule a configuration says."""

from __future__ import annotations

from clustersim.core.errors import ScenarioError, nearest_divisor
from clustersim.training.parallel.config import ParallelConfig


def blocks_of_stages(parallel: ParallelConfig, layers: int, stages: int) -> list[int]:
    """Layers of each of ``stages`` stages, in the model's order; of a layout of letters and of DeepSpeed's balance by
    parameters :mod:`clustersim.training.partition.stages` knows more.

    Raises :class:`ScenarioError` with field, value and the nearest that works where they do not divide, or a layout
    does not add up.
    """
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
        return weighted(layers, stages)
    return _equal(parallel, layers, max(1, stages // parallel.pp))


def weighted(layers: int, stages: int, first_less: int = 0, last_less: int = 0) -> list[int]:
    """torchtitan's split: embedding and head weigh so many layers, and the first stages take what is left over
    (distributed/pipeline_parallel.py ``generate_llm_fqn_per_model_part``). Where they weigh nothing it is DeepSpeed's
    ``partition_uniform``.

    >>> weighted(32, 4, 1, 1)
    [8, 9, 8, 7]
    """
    per_stage, extra = divmod(layers + first_less + last_less, stages)
    counts = [per_stage + (stage < extra) for stage in range(stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    if min(counts) < 0:
        raise ScenarioError(
            f"first_stage_less_layers = {first_less} and last_stage_less_layers = {last_less} leave a stage of "
            f"{layers} layers in {stages} stages with less than none (at $.parallel.first_stage_less_layers)"
        )
    return counts


def _equal(parallel: ParallelConfig, layers: int, vpp: int) -> list[int]:
    """Megatron's: ranks are equal but for the first and the last, where these are given; embedding and loss may count
    as a layer each.

    Megatron-LM transformer/transformer_block.py ``get_num_layers_to_build``: a rank's layers are divided over its
    chunks, and chunk c of all ranks precedes chunk c + 1 of any.
    """
    p = parallel.pp
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    counted = (parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split)
    given = [n for n in (first, last) if n is not None]
    if any(counted) and given:
        name = f"account_for_{'embedding' if counted[0] else 'loss'}_in_pipeline_split"
        raise refuse(name, f"{name} and decoder_*_pipeline_num_layers both set the ends of the pipeline; say one")
    rest = layers - sum(given) + sum(counted)
    ranks = p - len(given)
    if rest < 0 or ranks < (rest > 0) or (ranks and rest % (ranks * vpp)):
        problem = f"{rest} layers do not divide over {ranks} ranks" + (f" of {vpp} chunks" if vpp > 1 else "")
        beside = " beside the ends" if given else " with the embedding and loss counted" if any(counted) else ""
        field = "vpp" if ranks and rest % ranks == 0 else "pp"
        value, size = (vpp, rest // ranks) if field == "vpp" else (p, layers)
        fits = "" if given or any(counted) else f"; {nearest_divisor(size, value)}, or a layout"
        raise refuse(field, f"{field} = {value}: {problem}{beside}{fits}")
    if any(n % vpp for n in given):
        raise refuse("vpp", f"vpp = {vpp} does not divide the layers of the ends, {', '.join(map(str, given))}")
    chunk = [rest // (ranks * vpp) if ranks else 0] * p
    for end, layers_there in ((0, first), (-1, last)):
        if layers_there is not None:
            chunk[end] = layers_there // vpp
    counts = chunk * vpp
    counts[0] -= counted[0]
    counts[-1] -= counted[1]
    return counts


def refuse(field: str, problem: str) -> ScenarioError:
    """The error that names a field of ``[parallel]``."""
    return ScenarioError(f"{problem} (at $.parallel.{field})")
