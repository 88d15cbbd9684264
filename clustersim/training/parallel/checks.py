"""What must divide what, and which settings exclude each other: one line with field, value and what would work.

Constraints are Megatron-LM's (training/arguments.py ``validate_args``, transformer/transformer_config.py,
parallel_state.py), DeepSpeed's (runtime/pipe/engine.py) and Transformer Engine's (context parallelism).
"""

from __future__ import annotations

from math import gcd, prod

import msgspec

from clustersim.core.errors import ScenarioError, nearest_divisor, nearest_number
from clustersim.training.parallel.config import ParallelConfig
from clustersim.training.parallel.counts import blocks_of_stages, refuse


class ModelShape(msgspec.Struct, frozen=True):
    """Sizes of a transformer; 0 is "has none" (an image model has no heads, a dense one no experts).

    Parameters
    ----------
    layers : blocks. seq_len : tokens of a sample. hidden : width. heads, kv_heads : of queries, and of keys and values.
    kv_heads_of : of blocks that do not have ``kv_heads``.
    ffn : width of the dense MLP. experts : of a layer. moe_ffn : width of a routed one. shared_ffn : of the shared ones
        together. biased : a bias of relative positions is added to scores.
    """

    layers: int
    seq_len: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    ffn: int = 0
    experts: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    kv_heads_of: tuple[int, ...] = ()
    biased: bool = False


def padded_vocab(vocab: int, divisible_by: int, tp: int) -> int:
    """Rows of the embedding: the vocabulary, up to a multiple of ``divisible_by * tp`` (Megatron-LM
    training/tokenizer ``vocab_size_with_padding``).

    >>> padded_vocab(50257, 128, 8)
    51200
    """
    step = divisible_by * tp
    return -(-vocab // step) * step


def _wrong(parallel: ParallelConfig, field: str, why: str) -> ScenarioError:
    """The error that begins with a field and its value."""
    value = getattr(parallel, field)
    value_text = str(value).lower() if isinstance(value, bool) else repr(value)
    return refuse(field, f"{field} = {value_text} {why}")


def check(parallel: ParallelConfig, shape: ModelShape, world: int) -> None:
    """Raise :class:`ScenarioError` with field, value and the nearest value that works, for the first thing wrong.

    parallel : what is asked for. shape : the model's sizes. world : ranks that compute.
    """
    for rule in (_world, _tensor, _sequence, _context, _experts, _expert_settings, _stages, _pipeline):
        rule(parallel, shape, world)
    _recompute(parallel)
    _optimizer(parallel, world)


WHOLE_EXPERTS = ", or set parallel.etp = 1, which leaves each expert whole"
"""What is right where experts are cut as tensor parallelism cuts the other layers."""


def _world(parallel: ParallelConfig, shape: ModelShape, world: int) -> None:
    """``world % (tp cp pp)`` and ``world % (etp ep pp)``; the first degree that does not fit is named."""
    for names in (("tp", "cp", "pp"), ("tp", "ep", "pp") if parallel.etp is None else ("etp", "ep", "pp")):
        inside = 1
        # The pipeline's degree is named last: nodes are added in its multiples.
        for name in names:
            degree = getattr(parallel, name) or 1
            if world % (inside * degree):
                beside = f" beside {' * '.join(names[: names.index(name)])} = {inside}" if inside > 1 else ""
                fits = nearest_divisor(world // inside, degree)
                if "ep" in names and parallel.tp > 1 and parallel.etp is None:
                    whole = world % (parallel.ep * parallel.pp) == 0
                    fits += WHOLE_EXPERTS if whole else ""
                raise refuse(name, f"{name} = {degree} does not fit into {world} ranks{beside}; {fits}")
            inside *= degree
    parallel.dims(world)  # the order, and the replicas


def _tensor(parallel: ParallelConfig, shape: ModelShape, world: int) -> None:
    t = parallel.tp
    sizes = {"heads": shape.heads, "of hidden": shape.hidden, "of the MLP's width": shape.ffn}
    sizes["of the shared experts' width"] = shape.shared_ffn
    common = gcd(*sizes.values())
    if t > 1 and not shape.hidden:
        raise _wrong(parallel, "tp", "cuts attention and MLPs; the model has none; use 1")
    for size_name, size in sizes.items():
        if size % t:
            raise _wrong(parallel, "tp", f"does not divide {size:,} {size_name}; {nearest_divisor(common, t)}")
    every_kv = [kv for kv in (shape.kv_heads, *shape.kv_heads_of) if kv]
    for kv in every_kv:
        if kv % t and t % kv:
            fits = nearest_number(
                lambda n: common % n == 0 and all(k % n == 0 or n % k == 0 for k in every_kv), t, common
            )
            raise _wrong(parallel, "tp", f"is neither a divisor nor a multiple of {kv} key-value heads; {fits}")
    if t == 1 and parallel.tp_overlap != "none":
        raise _wrong(parallel, "tp_overlap", "overlaps what only tp > 1 sends; tp is 1")


def _sequence(parallel: ParallelConfig, shape: ModelShape, world: int) -> None:
    """Sequence parallelism, and what it excludes."""
    t = parallel.tp
    sp = parallel.sequence_parallel
    if sp and t == 1:
        raise _wrong(parallel, "sequence_parallel", "needs tp > 1; tp is 1")
    if sp and parallel.tp_grad_overlap:
        why = "overlaps an all_reduce that sequence_parallel = true replaces; leave one out"
        raise _wrong(parallel, "tp_grad_overlap", why)
    if not sp and parallel.tp_overlap != "none":
        raise _wrong(parallel, "tp_overlap", "needs sequence_parallel = true")
    if sp and shape.seq_len // parallel.cp % t:
        local = shape.seq_len // parallel.cp
        raise _wrong(parallel, "tp", f"does not divide the {local:,} tokens of a sequence; {nearest_divisor(local, t)}")
    if parallel.framework == "megatron" and shape.experts and t > 1 and not sp:
        raise refuse(
            "sequence_parallel", f"a mixture of experts with tp = {t} needs sequence_parallel = true, which is false"
        )


def _context(parallel: ParallelConfig, shape: ModelShape, world: int) -> None:
    c = parallel.cp
    s = shape.seq_len
    per_layer = parallel.cp_comm_type
    if not isinstance(per_layer, str) and len(per_layer) != shape.layers:
        raise refuse("cp_comm_type", f"cp_comm_type lists {len(per_layer)} layers; the model has {shape.layers}")
    if c == 1:
        if parallel.sp_overlap_comm:
            raise _wrong(parallel, "sp_overlap_comm", "overlaps what only cp > 1 sends; cp is 1")
        return
    if not s:
        raise _wrong(parallel, "cp", "splits a sequence; the model has none; use 1")
    pieces = 2 if parallel.cp_load_balancer == "headtail" else 1
    if s % (pieces * c):
        fits = nearest_number(lambda n: s % (pieces * n) == 0, c, s)
        raise _wrong(parallel, "cp", f"does not cut {s:,} tokens into {pieces * c} equal chunks; {fits}")
    kinds = {per_layer} if isinstance(per_layer, str) else set(per_layer)
    if parallel.sp_overlap_comm and (kinds != {"a2a"} or parallel.tp > 1):
        why = f"tp = 1; tp is {parallel.tp}" if kinds == {"a2a"} else f"cp_comm_type = 'a2a'; it is {per_layer!r}"
        raise _wrong(parallel, "sp_overlap_comm", f"is DeepSpeed's Ulysses, and needs {why}")
    inner = _inner_all_to_all(parallel, "a2a+p2p" in kinds)
    for kind, ranks in (("a2a", c), ("a2a+p2p", inner)):
        if kind in kinds:
            _heads_of_all_to_all(parallel, shape, kind, ranks)


def _inner_all_to_all(parallel: ParallelConfig, needed: bool) -> int:
    """Ranks of the inner all-to-all of a2a+p2p; 1 without one."""
    name = "hierarchical_context_parallel_sizes"
    sizes = parallel.hierarchical_context_parallel_sizes
    if needed and sizes is None:
        raise refuse(name, f"cp_comm_type 'a2a+p2p' needs {name}, two sizes whose product is cp {parallel.cp}")
    if sizes is not None and (len(sizes) != 2 or prod(sizes) != parallel.cp):
        product = " * ".join(map(str, sizes))
        raise refuse(name, f"{name} {product} are not two sizes whose product is cp {parallel.cp}")
    return sizes[0] if sizes else 1


def _heads_of_all_to_all(parallel: ParallelConfig, shape: ModelShape, kind: str, ranks: int) -> None:
    """Each rank of the all_to_all gets whole heads; DeepSpeed's Ulysses alone may give them unevenly."""
    if parallel.framework == "deepspeed":
        return
    keys = [("key-value heads", kv_heads) for kv_heads in (shape.kv_heads, *shape.kv_heads_of)]
    for heads_name, heads in (("heads", shape.heads), *keys):
        local = max(1, heads // parallel.tp)
        if heads and local % ranks:
            field = "cp" if kind == "a2a" else "hierarchical_context_parallel_sizes"
            near = nearest_divisor(local, ranks)
            why = f"{kind} over {ranks} ranks does not divide the {local} {heads_name} of a rank"
            raise refuse(field, f"{why}; {near}, or another cp_comm_type")


def _experts(parallel: ParallelConfig, shape: ModelShape, world: int) -> None:
    e = parallel.ep
    experts = shape.experts
    cut = parallel.etp or parallel.tp
    if e > 1 and not experts:
        raise _wrong(parallel, "ep", "spreads experts; the model has none; use 1")
    if experts % e:
        raise _wrong(parallel, "ep", f"does not divide {experts} experts; {nearest_divisor(experts, e)}")
    if experts and shape.moe_ffn % cut:
        field = "tp" if parallel.etp is None else "etp"
        near = nearest_divisor(shape.moe_ffn, cut)
        raise _wrong(parallel, field, f"does not divide {shape.moe_ffn:,} of an expert's width; {near}{WHOLE_EXPERTS}")


def _expert_settings(parallel: ParallelConfig, shape: ModelShape, world: int) -> None:
    """What Megatron-Core's ``TransformerConfig.__post_init__`` refuses of experts (NVIDIA/Megatron-LM at 002526d8).

    Earlier cores dropped tokens with ``alltoall`` alone; now the router drops for every dispatcher, and what is padded
    to the capacity does not go by DeepEP. ``delay_wgrad_compute`` needs
    ``overlap_moe_expert_parallel_comm``, which does without it.
    """
    if parallel.float8_dispatch and parallel.dispatcher != "flex":
        what = f"is what the kernels of 'flex' have; dispatcher is {parallel.dispatcher!r}"
        raise _wrong(parallel, "float8_dispatch", what)
    if parallel.pad_to_capacity and parallel.capacity_factor is None:
        raise _wrong(parallel, "pad_to_capacity", "needs a capacity_factor, such as 1.0")
    if parallel.dispatcher == "allgather" and parallel.capacity_factor is not None:
        factor_text = f"capacity_factor = {parallel.capacity_factor:g} says; use 'alltoall'"
        raise _wrong(parallel, "dispatcher", f"sends every token everywhere, whatever {factor_text}")
    if parallel.pad_to_capacity and parallel.dispatcher == "flex" and parallel.flex_backend != "hybridep":
        raise _wrong(parallel, "pad_to_capacity", "is not what DeepEP has; use dispatcher = 'alltoall' or hybridep")
    if parallel.shared_expert_overlap and parallel.dispatcher == "allgather":
        why = "needs dispatcher = 'alltoall' or 'flex', not 'allgather'"
        raise _wrong(parallel, "shared_expert_overlap", why)
    if parallel.delay_wgrad_compute and not parallel.ep_overlap:
        raise _wrong(parallel, "delay_wgrad_compute", "needs ep_overlap = true, which is false")
    if not parallel.ep_overlap:
        return
    if parallel.dispatcher == "allgather" and parallel.framework == "megatron":
        raise _wrong(parallel, "ep_overlap", "needs dispatcher = 'alltoall' or 'flex', not 'allgather'")
    if parallel.ep == 1:
        raise _wrong(parallel, "ep_overlap", "overlaps what only ep > 1 sends; ep is 1")
    if parallel.shared_expert_overlap:
        raise refuse("ep_overlap", "ep_overlap and shared_expert_overlap exclude each other; both are true")
    if parallel.recompute_granularity == "full":
        raise _wrong(parallel, "ep_overlap", "excludes recompute_granularity = 'full'")
    if parallel.pp > 1 and parallel.chunks(shape.layers) == 1:
        raise _wrong(parallel, "ep_overlap", f"with pp = {parallel.pp} needs vpp > 1; vpp is 1")


def _stages(parallel: ParallelConfig, shape: ModelShape, world: int) -> None:
    """Whether the layers make as many stages."""
    p = parallel.pp
    layers = shape.layers
    if parallel.layout is not None:
        _layout(parallel, shape)
        return
    vpp = parallel.chunks(layers)
    per_chunk = parallel.layers_per_virtual_stage
    if per_chunk is not None and parallel.vpp not in {None, vpp}:
        raise _wrong(parallel, "vpp", f"contradicts {per_chunk} layers a chunk, which make {vpp} on each rank")
    if per_chunk is not None and (n_chunks := parallel.made_of(layers, per_chunk)) % p:
        near = nearest_divisor(max(1, layers // p), per_chunk)
        why = (
            f"layers_per_virtual_stage = {per_chunk} makes {n_chunks} chunks of {layers} layers, which pp {p} does "
            f"not divide"
        )
        raise refuse("layers_per_virtual_stage", f"{why}; {near}")
    counted = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    if p * vpp > layers + counted:
        field, value = ("pp", p) if p > layers else ("vpp", vpp)
        ranks = world // (parallel.tp * parallel.cp)
        fits = nearest_divisor(gcd(layers, ranks) if field == "pp" else layers // p, value)
        raise refuse(field, f"{field} = {value} makes {p * vpp} stages of {layers} layers; {fits}")
    if parallel.partition_method not in {"parameters", "compute"}:
        blocks_of_stages(parallel, layers, p * vpp)


def _layout(parallel: ParallelConfig, shape: ModelShape) -> None:
    """Whether a layout has as many stages as there are; partition says whether it adds up to the model."""
    contradicting = [
        name
        for name in (
            "vpp",
            "layers_per_virtual_stage",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "first_stage_less_layers",
            "last_stage_less_layers",
            "partition_method",
        )
        if getattr(parallel, name) is not None
    ]
    if parallel.framework == "megatron" and contradicting and contradicting != ["vpp"]:
        raise refuse("layout", f"layout and {contradicting[-1]} both say which layers a stage has; say one")
    stages = parallel.stages
    if len(stages) % parallel.pp or parallel.vpp not in {None, len(stages) // parallel.pp}:
        raise refuse(
            "layout", f"layout has {len(stages)} stages, which pp {parallel.pp} and vpp {parallel.vpp or 1} do not make"
        )


def _pipeline(parallel: ParallelConfig, shape: ModelShape, world: int) -> None:
    """Messages between stages; what a schedule needs is its own to say."""
    chunks = parallel.chunks(shape.layers)
    if chunks > 1 and parallel.pp == 1:
        raise refuse("vpp", f"vpp = {chunks} needs pp > 1; pp is 1")
    if chunks > 1 and parallel.schedule is None and parallel.pp == 2 and not parallel.overlap_p2p_communication:
        raise _wrong(parallel, "overlap_p2p_communication", "with vpp > 1 needs pp > 2; pp is 2")
    if parallel.defer_embedding_wgrad_compute and parallel.pp == 1:
        raise _wrong(parallel, "defer_embedding_wgrad_compute", "needs pp > 1; pp is 1")


def _recompute(parallel: ParallelConfig) -> None:
    granularity = parallel.recompute_granularity
    method = parallel.recompute_method
    for name in ("recompute_method", "recompute_num_layers"):
        if getattr(parallel, name) is not None and granularity != "full":
            raise _wrong(parallel, name, f"belongs to recompute_granularity = 'full'; it is {granularity!r}")
    if granularity == "full" and (method is None or parallel.recompute_num_layers is None):
        why = "needs recompute_method and recompute_num_layers, such as 'uniform' and 1"
        raise _wrong(parallel, "recompute_granularity", why)
    if parallel.recompute_modules is not None and granularity != "selective":
        raise refuse(
            "recompute_modules",
            f"recompute_modules belong to recompute_granularity = 'selective'; it is {granularity!r}",
        )
    partial = "num_microbatches_with_partial_activation_checkpoints"
    if getattr(parallel, partial) is not None and (parallel.pp == 1 or granularity == "selective"):
        need = "pp > 1; pp is 1" if parallel.pp == 1 else "recompute_granularity = 'full', or none; it is 'selective'"
        raise _wrong(parallel, partial, f"needs {need}")
    if parallel.distribute_saved_activations:
        wrong = {
            "tp > 1": parallel.tp == 1,
            "recompute_granularity = 'full'": granularity != "full",
            "sequence_parallel = false": parallel.sequence_parallel,
        }
        for need in (name for name, holds in wrong.items() if holds):
            raise _wrong(parallel, "distribute_saved_activations", f"needs {need}")


def _optimizer(parallel: ParallelConfig, world: int) -> None:
    if parallel.overlap_param_gather:
        for name in ("use_distributed_optimizer", "overlap_grad_reduce"):
            if not getattr(parallel, name):
                raise _wrong(parallel, "overlap_param_gather", f"needs {name} = true")
    copies = "num_distributed_optimizer_instances"
    if getattr(parallel, copies) > 1 and not parallel.use_distributed_optimizer:
        raise _wrong(parallel, copies, "needs use_distributed_optimizer = true")
    if parallel.ddp_bucket_size is not None and parallel.ddp_num_buckets is not None:
        raise refuse("ddp_num_buckets", "ddp_bucket_size and ddp_num_buckets both say how large a bucket is; say one")
