"""Other names of the ``[parallel]`` fields: Megatron's long ones, torchtitan's and DeepSpeed's, and their defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from clustersim.errors import ScenarioError, nearest
from clustersim.parallel.config import ParallelConfig
from clustersim.texts import Table

FIELDS: tuple[str, ...] = ParallelConfig.__struct_fields__

_MEGATRON = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "num_virtual_stages_per_pipeline_rank": "vpp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "num_layers_per_virtual_pipeline_stage": "layers_per_virtual_stage",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "pipeline_model_parallel_layout": "layout",
    "overlap_p2p_comm": "overlap_p2p_communication",
    "overlap_p2p_comm_warmup_flush": "overlap_p2p_communication_warmup_flush",
    "moe_token_dispatcher_type": "dispatcher",
    "moe_flex_dispatcher_backend": "flex_backend",
    "moe_expert_capacity_factor": "capacity_factor",
    "moe_pad_expert_input_to_capacity": "pad_to_capacity",
    "moe_shared_expert_overlap": "shared_expert_overlap",
    "overlap_moe_expert_parallel_comm": "ep_overlap",
    "enable_optimizer_post_validation": "optimizer_post_validation",
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
}
_TORCHTITAN = {
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "context_parallel_degree": "cp",
    "expert_parallel_degree": "ep",
    "expert_tensor_parallel_degree": "etp",
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "enable_sequence_parallel": "sequence_parallel",
    "pipeline_parallel_schedule": "schedule",
    "pipeline_parallel_schedule_csv": "schedule_csv",
    "pipeline_parallel_layers_per_stage": "layers_per_virtual_stage",
    "pipeline_parallel_first_stage_less_layers": "first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers": "last_stage_less_layers",
    "num_pp_microbatches": "microbatches",
}
_DEEPSPEED = {
    "model_parallel_size": "tp",
    "sequence_parallel_size": "cp",
    "ep_size": "ep",
    "gradient_accumulation_steps": "microbatches",
    "train_batch_size": "global_batch_size",
}
SAME: dict[str, str] = _MEGATRON | _TORCHTITAN | _DEEPSPEED
"""Another name -> the field; the value is the same."""

Values = Table
_FLAGS: dict[str, tuple[Values, Values]] = {
    "tp_comm_overlap": ({"tp_overlap": "userbuffers"}, {"tp_overlap": "none"}),
    "enable_async_tensor_parallel": ({"tp_overlap": "async_tp"}, {"tp_overlap": "none"}),
    "async_tensor_model_parallel_allreduce": ({"tp_grad_overlap": True}, {"tp_grad_overlap": False}),
    "no_async_tensor_model_parallel_allreduce": ({"tp_grad_overlap": False}, {"tp_grad_overlap": True}),
    "no_gradient_accumulation_fusion": (
        {"gradient_accumulation_fusion": False},
        {"gradient_accumulation_fusion": True},
    ),
    "no_overlap_p2p_communication": ({"overlap_p2p_communication": False}, {"overlap_p2p_communication": True}),
    "moe_router_force_load_balancing": ({"routing": {"kind": "balanced"}}, {}),
    "moe_force_load_balance": ({"routing": {"kind": "balanced"}}, {}),
    "use_tp_pp_dp_mapping": ({"order": "tp-cp-ep-pp-dp"}, {}),
    "pipe_partitioned": ({"pipeline_partitioned": True}, {"pipeline_partitioned": False}),
    "grad_partitioned": ({"pipeline_partitioned": True}, {"pipeline_partitioned": False}),
    "recompute_activations": ({"recompute_granularity": "selective"}, {}),
}
"""A switch -> what it says when true, and when false."""

_CHOICES: dict[str, dict[object, Values]] = {
    "context_parallel_rotate_method": {
        "allgather": {"cp_comm_type": "all_gather"},
        # Each rotation is an all_to_all in which every rank sends to its neighbour alone: a ring.
        "alltoall": {"cp_comm_type": "p2p"},
    },
    "fsdp_reshard_after_forward": {
        "default": {},
        "always": {"strategy.reshard_after_forward": True},
        "never": {"strategy.reshard_after_forward": False},
    },
}
"""A choice -> what each of its values says; a dotted name is a field of another table."""

_ELSEWHERE = {
    "micro_batch_size": "strategy.micro_batch_size",
    "train_micro_batch_size_per_gpu": "strategy.micro_batch_size",
    "seq_length": "model.seq_len",
    "num_experts": "model.options.experts",
    "moe_router_topk": "model.options.experts_per_token",
    "k": "model.options.experts_per_token",
    "activation_checkpoint_mode": "model.activation_checkpointing",
}
"""What the frameworks write beside these settings, and where a scenario has it."""

_TABLES = (
    "parallelism", "training", "compile", "debug", "activation_checkpoint", "pipeline", "zero_optimization", "moe",
)  # fmt: skip
"""Tables of torchtitan's and DeepSpeed's files that a name may be written with: ``debug.moe_force_load_balance``."""


def _two_chunks(said: Table) -> Values:
    """torchtitan gives each rank two stages under a schedule of several, unless it is told their layers."""
    if {"vpp", "layers_per_virtual_stage", "layout"} & set(said):
        return {}
    several = ("interleaved", "loopedbfs", "zbv", "dualpipev")
    return {"vpp": 2} if str(said.get("schedule", "")).lower().startswith(several) else {}


PRESETS: dict[str, Callable[[Table], Values]] = {
    "megatron": lambda said: {},
    "torchtitan": lambda said: {
        "order": "torchtitan",
        **({"etp": 1} if said.get("ep", 1) != 1 else {}),
        "sequence_parallel": said.get("tp", 1) != 1,
        "cp_comm_type": "all_gather",
        "dispatcher": "alltoall",
        "first_stage_less_layers": 1,
        "last_stage_less_layers": 1,
        **_two_chunks(said),
        "deallocate_pipeline_outputs": False,
        "make_vocab_size_divisible_by": 1,
    },
    "deepspeed": lambda said: {
        "order": "deepspeed",
        "cp_comm_type": "a2a",
        "dispatcher": "alltoall",
        "capacity_factor": 1.0,
        "min_capacity": 4,
        "pad_to_capacity": True,
        "pipeline_partitioned": said.get("tp", 1) != 1 and said.get("pp", 1) != 1,
        "partition_method": "parameters",
        "deallocate_pipeline_outputs": False,
        "make_vocab_size_divisible_by": 1,
    },
    "oneflow": lambda said: {
        "tp_grad_overlap": False,
        "gradient_accumulation_fusion": True,
        "deallocate_pipeline_outputs": False,
    },
}
"""What a framework has where nothing is said (torchtitan/config/configs.py; deepspeed runtime/config.py,
runtime/pipe/{engine,module}.py and moe/layer.py; Oneflow-Inc/libai libai/models/utils/graph_base.py: NCCL on the
compute stream, sums fused), from what is said; Megatron-LM's are the fields' own defaults."""


def field_for(name: str) -> str | None:
    """Where a scenario has what some framework calls ``name``, such as ``"parallel.pp"``; None where nobody does."""
    plain = _plain(name)
    if plain in _ELSEWHERE:
        return _ELSEWHERE[plain]
    if plain in FIELDS or plain in SAME:
        return f"parallel.{SAME.get(plain, plain)}"
    if plain in _FLAGS:
        return f"parallel.{next(iter(_FLAGS[plain][0]))}"
    return None


def translate(table: Table, at: str = "$.parallel") -> tuple[Values, Values]:
    """The table by its fields' own names.

    Parameters
    ----------
    table : as written, by any names. at : its field path, for errors.

    Returns the fields, and beside them what belongs to other tables, by dotted name (``"strategy.micro_batch_size"``).
    Raises :class:`ScenarioError` for a name that nobody has, with the nearest, and where two names give one field
    different values, naming both.
    """
    found: Values = {}
    said: dict[str, str] = {}
    for name, value in _flat(table):
        for field, meant in _meaning(name, value, at).items():
            if field in found and found[field] != meant:
                raise ScenarioError(
                    f"{said[field]} = {found[field]!r} and {name} = {value!r} contradict each other; write {field} "
                    f"once (at {at}.{field})"
                )
            found.setdefault(field, meant)
            said.setdefault(field, name)
    _batches(found)
    here = {field: value for field, value in found.items() if "." not in field}
    return here, {field: value for field, value in found.items() if "." in field}


def _flat(table: Table) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if _plain(name) in _TABLES and isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", inside) for inner, inside in value.items())
        else:
            yield name, value


def _plain(name: str) -> str:
    """``"--tensor-model-parallel-size"`` and ``"activation_checkpoint.mode"`` as they are looked up."""
    name = name.removeprefix("--").replace("-", "_")
    table, _, inner = name.rpartition(".")
    return inner if inner not in {"mode", "stages", "stage", "partition_method"} else f"{table}_{inner}".lstrip("_")


def _meaning(name: str, value: object, at: str) -> Values:
    plain = _plain(name)
    if plain in _FLAGS:
        if not isinstance(value, bool):
            raise ScenarioError(f"{name} = {value!r} does not fit: expected true or false (at {at}.{name})")
        return _FLAGS[plain][0 if value else 1]
    if plain in _CHOICES:
        if value not in _CHOICES[plain]:
            known = ", ".join(map(repr, _CHOICES[plain]))
            raise ScenarioError(f"{name} = {value!r} is not a choice; known: {known} (at {at}.{name})")
        return _CHOICES[plain][value]
    if plain in _SPECIAL:
        return _SPECIAL[plain](value)
    if plain in _ELSEWHERE:
        return {_ELSEWHERE[plain]: value}
    if plain in SAME or plain in FIELDS:
        return {SAME.get(plain, plain): value}
    near = nearest(plain, [*FIELDS, *SAME, *_FLAGS, *_CHOICES, *_ELSEWHERE, *_SPECIAL])
    near = near if near.startswith("did") else f"the first ones are {', '.join(FIELDS[1:5])} (docs: ParallelConfig)"
    raise ScenarioError(f"unknown field {name!r} = {value!r}; {near} (at {at}.{name})")


def _interval(value: object) -> Values:
    """DeepSpeed's ``activation_checkpoint_interval``: 0 is none, n keeps the input of every n-th layer."""
    if not value:
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": value}


_SPECIAL: dict[str, Callable[[object], Values]] = {
    "activation_checkpoint_interval": _interval,
    "pipeline_stages": lambda value: {} if value == "auto" else {"pp": value},
    "pipeline_partition_method": lambda value: {"partition_method": value},
    "routing": lambda value: {"routing": {"kind": value} if isinstance(value, str) else value},
    "context_parallel_load_balancer": lambda value: {"cp_load_balancer": value or "none"},
    "zero_optimization_stage": lambda value: {"strategy.zero_optimization.stage": value},
    "local_batch_size": lambda value: {"local.batch_size": value},
    "pipeline_parallel_microbatch_size": lambda value: {"strategy.micro_batch_size": value},
}


def _batches(found: Values) -> None:
    """torchtitan's ``local_batch_size`` is what a replica sees at once: all micro-batches of a pipeline together."""
    local = found.pop("local.batch_size", None)
    if not isinstance(local, int):
        return
    each, count = found.get("strategy.micro_batch_size"), found.get("microbatches")
    if isinstance(each, int) and each > 0 and local % each == 0:
        found["microbatches"] = local // each
    elif each is None and isinstance(count, int) and count > 0 and local % count == 0:
        found["strategy.micro_batch_size"] = local // count
    elif each is None and count is None:
        found["strategy.micro_batch_size"] = local
    else:
        raise ScenarioError(
            f"local_batch_size = {local} does not divide into micro-batches of {each} samples or into {count} of them "
            "(at $.parallel.local_batch_size)"
        )
