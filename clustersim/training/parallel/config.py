"""The ``[parallel]`` table: degrees, pipeline, and how communication is played."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from clustersim.core.dims import Dims
from clustersim.core.errors import ScenarioError, nearest_divisor
from clustersim.core.limits import MOST_MICROBATCHES, counted
from clustersim.training.parallel.layout import stages_of

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0)]
CpComm = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class Routing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``routing``: which experts tokens visit. Written as a text, it is ``kind`` alone.

    Parameters
    ----------
    kind : ``uniform``: every token draws its experts alike at random; ``balanced``: every expert gets the same number
        (Megatron's ``moe_router_force_load_balancing``, whose scores are random); ``round_robin``: every token the next
        k of them, which are on few ranks (torchtitan's ``debug.moe_force_load_balance``, NeMo Automodel's
        ``fake_balanced_gate``); ``skewed``: some are drawn more often; ``histogram``: as often as was measured.
    skew : of ``skewed``, load of the busiest expert over the mean, in expectation. seed : of the draws.
    file : of ``histogram``, a CSV of tokens per expert, a row per layer, relative to the scenario.
    """

    kind: Literal["uniform", "balanced", "round_robin", "skewed", "histogram"] = "uniform"
    skew: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    seed: int = 0
    file: str | None = None

    def __post_init__(self) -> None:
        if (self.kind == "histogram") != (self.file is not None):
            raise ValueError("routing from a histogram needs kind = 'histogram' and the file that holds it")
        if self.kind != "skewed" and self.skew != 1:
            raise ValueError(f"skew = {self.skew} belongs to kind = 'skewed', not to {self.kind!r}")

    @property
    def even(self) -> bool:
        """Whether every expert gets as many tokens as the others."""
        return self.kind in {"balanced", "round_robin"}


class ParallelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one model is split over ranks; what the data-parallel ranks do is ``[strategy]``.

    Defaults are those of Megatron-LM's command line (megatron/training/arguments.py and the config classes of
    megatron/core); ``framework`` puts another's in their place. Names are Megatron's, shortened where papers do; the
    frameworks' long names are accepted too (:mod:`clustersim.training.parallel.names`).

    Parameters
    ----------
    framework : whose defaults hold where nothing is said, see :data:`clustersim.training.parallel.names.PRESETS`.
    tp, pp, cp, ep : ranks of a tensor-, pipeline-, context- and expert-parallel group. etp : ranks that cut each
        expert; ``tp`` when absent. The data-parallel degree is what is left, ``world / (tp * cp * pp)``.
    dp_replicate, dp_shard : torchtitan's two data-parallel degrees, whose product is ``dp``; 1 replica, and a
        shard of what is left (-1 in torchtitan), when absent. FSDP shards over ``dp_shard * cp``.
    order : which dimension varies fastest, one of :data:`clustersim.core.dims.ORDERS` or Megatron's string.
    sequence_parallel : norms and dropout work on 1/tp of the tokens; all_gather and reduce_scatter in all_reduce's
        place (arXiv 2205.05198 s4.2.2).
    tp_overlap : how tensor-parallel collectives overlap with their products: ``none``; ``bulk`` (beside an independent
        product); ``userbuffers`` (Transformer Engine's, rings and pipelines too, Megatron's ``tp_comm_overlap``);
        ``async_tp`` (PyTorch's micro-pipelined products).
    float8_tp : with sequence parallelism, all_gathers of the linears in blocks carry 8-bit elements (torchao's
        ``Float8ColwiseParallel``, torchtitan's with tensor-wise scaling).
    tp_grad_overlap : without sequence parallelism, backward's all_reduce runs beside the weight gradient of the same
        layer; on there when absent.
    vpp : chunks (virtual stages) of each pipeline rank. layers_per_virtual_stage : the same said by layers of a chunk.
    schedule : a pipeline schedule by any framework's name; ``1f1b``, or ``interleaved`` with more than one chunk, when
        absent. schedule_csv : a schedule as PyTorch saves it, relative to the scenario.
    microbatches : per step and replica. global_batch_size : samples of a step over all replicas, from which
        ``microbatches`` follow; one of the two, or ``strategy.gradient_accumulation_steps``.
    layout : layers of every stage: Megatron's string (``"Et*3|(tt|)*29,m|L"``) or a number of layers per chunk, in
        the order of the model.
    decoder_first_pipeline_num_layers, decoder_last_pipeline_num_layers : layers of the first and the last rank; the
        others share the rest evenly.
    account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split : each counts as one layer.
    first_stage_less_layers, last_stage_less_layers : torchtitan's: the embedding and the head weigh so many layers.
    partition_method : DeepSpeed's split by ``parameters`` or ``uniform``ly by layers, or nanotron's by ``compute``,
        where the head weighs as many blocks as its product is as large.
    microbatch_group_size_per_vp_stage : micro-batches that pass a chunk before the next one's turn; ``pp`` when absent.
    overlap_p2p_communication : interleaved schedules send beside compute (on from Megatron's command line).
    overlap_p2p_communication_warmup_flush : in warm-up and cool-down too.
    pipeline_partitioned : each tensor-parallel rank sends 1/tp of an activation, which its receivers all_gather
        (DeepSpeed's ``pipe_partitioned`` and ``grad_partitioned``).
    variable_seq_lengths : the shape is sent before every tensor, and the host waits for it.
    deallocate_pipeline_outputs : an output that has been sent is freed.
    defer_embedding_wgrad_compute : weight gradients of the head wait for the drain, those of at most
        ``wgrad_deferral_limit`` micro-batches (0 is no limit).
    cp_comm_type : ``p2p`` (ring), ``all_gather``, ``a2a`` (Ulysses) or ``a2a+p2p``; a list has one for each layer.
    hierarchical_context_parallel_sizes : of ``a2a+p2p``, ranks of the all-to-all and of the ring.
    cp_load_balancer : ``headtail``: rank r has chunks r and 2 cp - 1 - r of the sequence; ``none``: consecutive ones.
    sp_overlap_comm : DeepSpeed's Ulysses overlaps backward's all-to-alls of queries and keys with the products behind
        values and keys, where each has a product of its own.
    dispatcher : how tokens reach their experts: ``allgather``, ``alltoall``, or ``flex`` by ``flex_backend``, where
        ``uccl`` is UCCL-EP in DeepEP's place. deepep_num_sms : that the kernels of these two run on.
    float8_dispatch : of ``flex``, tokens and the gradients of experts' outputs travel to their experts in 8 bits, with
        a scale for every 128; what comes back stays in 16 bits (arXiv 2412.19437 s3.3.3).
    float8_activations : linears of blocks and their activations keep their inputs for backward in 8 bits, with a scale
        for every 128, and so do weight gradients that wait; attention's output, norms, router and head stay in 16,
        and what experts put out is weighted before, and not kept (arXiv 2412.19437 s3.3; Transformer Engine's linears
        with Megatron's ``activation_func_fp8_input_store``).
    capacity_factor : an expert takes at most ``tokens * top_k / experts`` times this, and at least ``min_capacity``;
        absent is dropless. pad_to_capacity : experts' inputs are padded to it. drop_tokens : what is beyond is
        dropped; false grows the capacity to the largest load (DeepSpeed's).
    load_balancing : of the router, Megatron's ``moe_router_load_balancing_type``; what it calls takes the host time.
    router_dtype : of the router's product and scores, ``fp32`` or that of its input (Megatron's ``moe_router_dtype``);
        in 8 bits it is never.
    router_fusion : scores, choice and balance loss are fused kernels (Megatron's ``moe_router_fusion``), not called one
        by one.
    router_padding : the router's map has each expert's tokens padded to what products in 8 bits take (Megatron's
        ``moe_router_padding_for_quantization``); else a kernel copies their rows ahead of the products, and back.
    permute_fusion : tokens are brought into the order of experts, and summed, by one pass (Megatron's
        ``moe_permute_fusion``). Without it a mask picks the rows, and Megatron's host waits for the mask's sum: ahead
        of ``alltoall``'s permutation, behind DeepEP's dispatch (core/transformer/moe/moe_utils.py, ``permute``).
    routing : see :class:`Routing`.
    shared_expert_overlap : shared experts run on a side stream beside dispatch and combine.
    ep_overlap : experts' communication of one micro-batch beside the compute of another (Megatron's
        ``overlap_moe_expert_parallel_comm``). delay_wgrad_compute : with it, weight gradients of experts run beside the
        exchange behind their input gradients, and those of attention behind their layer.
    recompute_granularity : what backward computes again: ``full`` layers, or ``selective``ly ``recompute_modules``.
    recompute_method : of ``full``: ``uniform``: units of ``recompute_num_layers`` layers keep their input; ``block``:
        the first so many layers of each (virtual) stage keep theirs, the others everything.
    recompute_num_layers : see ``recompute_method``. recompute_modules : of ``selective``; ``core_attn`` when absent.
    distribute_saved_activations : each tensor-parallel rank keeps 1/tp of what ``full`` saves.
    num_microbatches_with_partial_activation_checkpoints : of every window of micro-batches in flight, how many use
        the setting; the others recompute every layer. Of Megatron's own schedules.
    use_distributed_optimizer : optimizer states are shared out over dp * cp. num_distributed_optimizer_instances :
        copies of them, each shared out over ``dp * cp / instances``.
    overlap_grad_reduce, overlap_param_gather : gradient buckets beside backward; parameters beside forward.
    align_grad_reduce : stages of an interleaved schedule launch their buckets together.
    ddp_bucket_size : [elements] of a gradient bucket; ``max(40e6, 1e6 dp)`` when absent. ddp_num_buckets : the same
        said by their number.
    grad_reduce_in_fp32 : gradients are reduced in fp32; for bf16 parameters when absent.
    optimizer_post_validation : every stage updates as soon as it has its gradients, and what the norm of all of them
        says is made good afterwards (sail-sg/zero-bubble-pipeline-parallelism); else the norm is a barrier.
    gradient_accumulation_fusion : the product that makes a weight gradient adds it to the kept one; without it a pass
        over all gradients does, in every micro-batch. On with Megatron when absent, off elsewhere.
    make_vocab_size_divisible_by : the vocabulary is padded to a multiple of this times ``tp``.
    """

    framework: Literal["megatron", "torchtitan", "deepspeed", "oneflow", "nanotron"] = "megatron"
    tp: AtLeastOne = 1
    pp: AtLeastOne = 1
    cp: AtLeastOne = 1
    ep: AtLeastOne = 1
    etp: AtLeastOne | None = None
    dp_replicate: AtLeastOne | None = None
    dp_shard: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    order: str = "megatron"
    sequence_parallel: bool = False
    tp_overlap: Literal["none", "bulk", "userbuffers", "async_tp"] = "none"
    float8_tp: bool = False
    tp_grad_overlap: bool | None = None
    vpp: AtLeastOne | None = None
    layers_per_virtual_stage: AtLeastOne | None = None
    schedule: str | None = None
    schedule_csv: str | None = None
    microbatches: AtLeastOne | None = None
    global_batch_size: AtLeastOne | None = None
    layout: str | tuple[Count, ...] | None = None
    decoder_first_pipeline_num_layers: AtLeastOne | None = None
    decoder_last_pipeline_num_layers: AtLeastOne | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    first_stage_less_layers: Count | None = None
    last_stage_less_layers: Count | None = None
    partition_method: Literal["uniform", "parameters", "compute"] | None = None
    microbatch_group_size_per_vp_stage: AtLeastOne | None = None
    overlap_p2p_communication: bool = True
    overlap_p2p_communication_warmup_flush: bool = False
    pipeline_partitioned: bool = False
    variable_seq_lengths: bool = False
    deallocate_pipeline_outputs: bool = True
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: Count = 0
    cp_comm_type: CpComm | tuple[CpComm, ...] = "p2p"
    hierarchical_context_parallel_sizes: tuple[AtLeastOne, ...] | None = None
    cp_load_balancer: Literal["headtail", "none"] = "headtail"
    sp_overlap_comm: bool = False
    dispatcher: Literal["allgather", "alltoall", "flex"] = "allgather"
    flex_backend: Literal["deepep", "hybridep", "uccl"] = "deepep"
    deepep_num_sms: AtLeastOne = 20
    float8_dispatch: bool = False
    float8_activations: bool = False
    capacity_factor: Share | None = None
    min_capacity: Count = 0
    pad_to_capacity: bool = False
    drop_tokens: bool = True
    load_balancing: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] = "aux_loss"
    router_dtype: Literal["fp32"] | None = None
    router_fusion: bool = False
    permute_fusion: bool = False
    router_padding: bool = False
    routing: Routing = Routing()
    shared_expert_overlap: bool = False
    ep_overlap: bool = False
    delay_wgrad_compute: bool = False
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: AtLeastOne | None = None
    recompute_modules: tuple[RecomputeModule, ...] | None = None
    distribute_saved_activations: bool = False
    num_microbatches_with_partial_activation_checkpoints: Count | None = None
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: AtLeastOne = 1
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_grad_reduce: bool = True
    ddp_bucket_size: AtLeastOne | None = None
    ddp_num_buckets: AtLeastOne | None = None
    grad_reduce_in_fp32: bool | None = None
    optimizer_post_validation: bool = False
    gradient_accumulation_fusion: bool | None = None
    make_vocab_size_divisible_by: AtLeastOne = 128

    def deferral(self, microbatches: int) -> int:
        """Micro-batches of a step whose weight gradients of the head wait for its end."""
        return (self.wgrad_deferral_limit or microbatches) if self.defer_embedding_wgrad_compute else 0

    @property
    def splits(self) -> bool:
        """Whether anything but data is split."""
        return max(self.tp, self.pp, self.cp, self.ep, self.etp or 1) > 1

    @property
    def stages(self) -> tuple[int | str, ...]:
        """The layout's stages in the model's order: numbers of layers, or one letter per layer; empty without one."""
        return stages_of(self.layout) if isinstance(self.layout, str) else self.layout or ()

    def chunks(self, layers: int) -> int:
        """Chunks (virtual stages) of each pipeline rank of a model of so many layers."""
        if self.stages:
            return max(1, len(self.stages) // self.pp)
        if self.layers_per_virtual_stage is None:
            return self.vpp or 1
        return max(1, self.made_of(layers, self.layers_per_virtual_stage) // self.pp)

    def made_of(self, layers: int, each: int) -> int:
        """Chunks of ``each`` layers, the last maybe shorter, embedding and head counted where they weigh."""
        ends = (self.first_stage_less_layers or 0) + (self.last_stage_less_layers or 0)
        ends += self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split
        return -(-(layers + ends) // each)

    def schedule_name(self, layers: int) -> str:
        """The schedule, or the one that Megatron takes for as many chunks."""
        return self.schedule or ("interleaved" if self.chunks(layers) > 1 else "1f1b")

    @property
    def overlaps_tp_gradient(self) -> bool:
        """Whether backward's all_reduce runs beside the weight gradient."""
        return not self.sequence_parallel if self.tp_grad_overlap is None else self.tp_grad_overlap

    def cp_comm(self, layer: int) -> CpComm:
        """How a layer's context-parallel ranks exchange keys and values."""
        return self.cp_comm_type if isinstance(self.cp_comm_type, str) else self.cp_comm_type[layer]

    def replicas(self, dp: int) -> int:
        """Copies of every shard among ``dp`` data-parallel ranks. Raises :class:`ScenarioError`."""
        copies = self.num_distributed_optimizer_instances
        replicate = self.dp_replicate
        shard = self.dp_shard
        if copies > 1 and (dp % copies or replicate not in {None, copies}):
            name = "num_distributed_optimizer_instances"
            why = f"does not divide dp {dp}; {nearest_divisor(dp, copies)}" if dp % copies else f"is not {replicate}"
            raise ScenarioError(f"{name} = {copies}, which is dp_replicate, {why} (at $.parallel.{name})")
        found = replicate or copies
        if dp % found:
            near = nearest_divisor(dp, found)
            raise ScenarioError(f"dp_replicate = {found} does not divide dp {dp}; {near} (at $.parallel.dp_replicate)")
        if shard not in {None, -1, dp // found}:
            other = f", or dp_replicate = {dp // shard}" if shard and dp % shard == 0 else ""
            raise ScenarioError(
                f"dp_shard = {shard} times dp_replicate {found} is not dp {dp}; use {dp // found}{other} "
                "(at $.parallel.dp_shard)"
            )
        return found

    def dims(self, world: int) -> Dims:
        """The dimensions of a mesh of ``world`` ranks.

        Raises :class:`ScenarioError` where they do not divide it.
        """
        inside = self.tp * self.cp * self.pp
        if world % inside:
            raise ScenarioError(
                f"tp {self.tp} * cp {self.cp} * pp {self.pp} = {inside} does not divide the world of {world} ranks"
            )
        sizes = self.hierarchical_context_parallel_sizes
        return Dims(
            tp=self.tp,
            cp=self.cp,
            pp=self.pp,
            dp=world // inside,
            ep=self.ep,
            etp=self.etp,
            dp_replicate=self.replicas(world // inside),
            cp_a2a=sizes[0] if sizes else 1,
            order=self.order,
        )

    def micro_batches(self, dp: int, micro_batch_size: int, accumulation: int = 1) -> int:
        """Micro-batches of a step on each of ``dp`` replicas; ``accumulation`` : the strategy's
        ``gradient_accumulation_steps``, where nothing else says how many.

        Raises :class:`ScenarioError` where the global batch is no multiple, or two fields say different numbers.
        """
        each = dp * micro_batch_size
        said = {} if self.microbatches is None else {"parallel.microbatches": self.microbatches}
        if self.global_batch_size is not None:
            whole, left = divmod(self.global_batch_size, each)
            if left:
                near = f"{whole * each} or {(whole + 1) * each}" if whole else f"{each}"
                raise ScenarioError(
                    f"global_batch_size = {self.global_batch_size} is no multiple of {micro_batch_size} samples on "
                    f"{dp} replicas; use {near} (at $.parallel.global_batch_size)"
                )
            said["parallel.global_batch_size"] = whole
        if accumulation > 1:
            said["strategy.gradient_accumulation_steps"] = accumulation
        if len(set(said.values())) > 1:
            (one, first), *others = said.items()
            other, second = next(pair for pair in others if pair[1] != first)
            raise ScenarioError(f"{one} comes to {first} micro-batches and {other} to {second}; say one (at $.{one})")
        for name, number in said.items():
            counted(number, MOST_MICROBATCHES, f"micro-batches of a step (at $.{name})", ScenarioError)
        return next(iter(said.values()), 1)
