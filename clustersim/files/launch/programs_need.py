"""What a framework's program needs to be told though nothing that is played depends on it: without these words its
own checks end the launch, or it splits the model otherwise than the other words say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clustersim.core import texts
from clustersim.core.errors import ScenarioError
from clustersim.core.mesh import Mesh
from clustersim.files.launch.table import FrameworkTable
from clustersim.model import named_models as models
from clustersim.scenario import Scenario
from clustersim.scenario.run.parts import located

SIZES = "parallelism_config.parallelism_config_"
ROTARY_BASE = 10_000
"""Of Megatron-LM, unless ``--rotary-base`` says another (megatron/training/arguments.py)."""
SHARDS = ("strategy.data_parallel_shard_degree", "parallel.dp_shard")


def accelerate_words(leaves: texts.Table, mesh: Mesh, path: str) -> texts.Table:
    """Keys of accelerate's YAML, by dotted name, beside those that its rows write.

    Its FSDP wraps nothing unless a policy says what (``FullyShardedDataParallelPlugin``), which would make the whole
    model one unit. Its ``ParallelismConfig`` takes no -1: sizes multiply to the number of processes.

    leaves : the scenario's, by field (:func:`~clustersim.files.launch.writing.canonical`). path : the scenario's.

    Raises :class:`ScenarioError` for degrees that ``ParallelismConfig`` refuses: tensors or sequences split beside
    anything but FSDP of version 2.
    """
    words: texts.Table = {}
    fsdp = leaves.get("strategy.kind") == "fsdp"
    if fsdp:
        sized = bool(leaves.get("strategy.min_num_params"))
        words["fsdp_config.fsdp_auto_wrap_policy"] = "SIZE_BASED_WRAP" if sized else "TRANSFORMER_BASED_WRAP"
    degrees = {name: int(leaves.get(f"parallel.{name}") or 1) for name in ("tp", "cp")}
    second = fsdp and leaves.get("strategy.version", 2) == 2
    for name, degree in degrees.items():
        if degree > 1 and not second and (name, degree) != ("tp", mesh.n_nodes * mesh.nproc_per_node):
            raise ScenarioError(
                f"{path}: Hugging Face accelerate has no word for {name} = {degree} beside a strategy other than FSDP "
                f"of version 2 (at $.parallel.{name})"
            )
    copies = _copies(leaves) if second else 1
    if copies * degrees["tp"] * degrees["cp"] == 1:
        return words
    words[f"{SIZES}dp_replicate_size"] = copies
    words[f"{SIZES}dp_shard_size"] = shards_left(leaves, mesh)  # 1 where tp takes all
    return words | {f"{SIZES}{name}_size": degree for name, degree in degrees.items()}


def trainer_words(args: texts.Table) -> texts.Table:
    """The Trainer's arguments without a model's name that is not the Hub's, which it would not load, and with its
    tables as it parses them: JSON."""
    written = dict(args)
    if "/" not in str(args.get("model_name_or_path", "/")):
        del written["model_name_or_path"]
    for name in args:
        table, _, inside = name.partition(".")
        if inside:
            written[table] = json.dumps({inside: written.pop(name)})
    return written


def shards_left(leaves: texts.Table, mesh: Mesh) -> int:
    """How many ranks share a copy of the model where ``data_parallel_shard_degree`` is -1: those that other degrees
    leave."""
    ways = _copies(leaves)
    for degree in (leaves.get(f"parallel.{name}") for name in ("tp", "cp", "pp")):
        ways *= int(degree or 1)
    return max(mesh.n_nodes * mesh.nproc_per_node // ways, 1)


def shards_unsaid(leaves: texts.Table, mesh: Mesh) -> texts.Table:
    """Leaves without a number of shards that is what other degrees leave: frameworks take it where none is said."""
    left = shards_left(leaves, mesh)
    return {name: value for name, value in leaves.items() if name not in SHARDS or value != left}


def _copies(leaves: texts.Table) -> int:
    return int(leaves.get("parallel.dp_replicate") or leaves.get("strategy.data_parallel_replicate_degree") or 1)


def unsaid(framework: str, leaves: texts.Table) -> list[str]:
    """What a framework's program has no word for though reading its words back would not tell: positions that are
    neither learned nor rotary, to deepspeedai's Megatron-DeepSpeed, and ALiBi to Megatron-LM (both of
    megatron's arguments.py, ``--position-embedding-type``)."""
    positions = leaves.get("shape.positions")
    has = {"deepspeed": {None, "learned", "rotary"}, "megatron": {None, "learned", "rotary", "none"}}
    if framework not in has or positions in has[framework]:
        return []
    return [f"shape.positions = {positions}: it would be learned"]


def megatron_deepspeed_words(leaves: texts.Table) -> texts.Table:
    """Arguments of Megatron-DeepSpeed's scripts beside those that rows write, as its
    examples_deepspeed/pretrain_llama2_distributed.sh has them.

    ``GPTModelPipe`` is built unless ``--no-pipeline-parallel``, and DeepSpeed's pipeline refuses ZeRO 2 and 3.
    ``--deepspeed-activation-checkpointing`` says whose function computes again, ``--recompute-granularity`` that layers
    are.
    """
    words: texts.Table = {}
    if int(leaves.get("parallel.pp") or 1) == 1:
        words["no_pipeline_parallel"] = True
    if leaves.get("model.activation_checkpointing") == "full":
        words |= {"recompute_granularity": "full", "recompute_method": "uniform"}
    return words


def positions(made: Scenario, table: FrameworkTable, leaves: texts.Table) -> Iterator[tuple[str, Any]]:
    """What a script needs of positions that are turned, though no step takes longer for it: Megatron-LM asks for the
    longest sequence (``validate_args``), and turns by a base of 10,000 unless it is told another."""
    if leaves.get("shape.positions") != "rotary" or not _builds(table):
        return
    config = _config(made)
    known = config.get("max_position_embeddings")
    yield "max_position_embeddings", max(known if isinstance(known, int) else 0, int(leaves["model.seq_len"] or 0))
    turned = _table(config, "rope_parameters")
    base = config.get("rope_theta") or turned.get("rope_theta")
    if table.name == "megatron" and isinstance(base, int | float) and base != ROTARY_BASE:
        yield "rotary_base", int(base)
    if table.name != "megatron":
        return
    if share := config.get("partial_rotary_factor") or turned.get("partial_rotary_factor"):
        yield "rotary_percent", share
    scaled = _table(config, "rope_scaling") or turned
    if scaled.get("rope_type") == "llama3":
        yield from {"use_rope_scaling": True, "rope_scaling_factor": scaled["factor"]}.items()


EPSILON = {"megatron": "norm_epsilon", "deepspeed": "layernorm_epsilon"}
"""What a program calls what is added to a variance; 1e-5 where nobody says it (both megatron/training/arguments.py)."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
"""What a config.json calls it."""
ROUTER = (
    ("scoring_func", "moe_router_score_function", "softmax"),
    ("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
    ("n_group", "moe_router_num_groups", 1),
    ("topk_group", "moe_router_group_topk", 1),
)
"""Of a router that scores experts: a config's field, Megatron-Core's word, and what is so without it."""


def untimed(made: Scenario, table: FrameworkTable) -> Iterator[tuple[str, Any]]:
    """Words of norms and routers that no step takes longer for, and that make the model the one that is named."""
    if not _builds(table) or table.name not in EPSILON:
        return
    config = _config(made)
    said = next((config[name] for name in EPSILONS if name in config), None)
    if said is not None:
        yield EPSILON[table.name], said
    if table.name != "megatron":
        return
    for field, word, usual in ROUTER:
        if config.get(field, usual) not in {usual, None}:
            yield word, config[field]
    if config.get("topk_method") == "noaux_tc":  # a bias of each expert instead of a loss (DeepSeek-V3's report)
        yield "moe_router_enable_expert_bias", True


def _builds(table: FrameworkTable) -> bool:
    """Whether its program builds a model from sizes on a command line."""
    return table.document != "toml" and "num_layers" in _known(table)


def _table(config: texts.Table, name: str) -> Mapping[str, Any]:
    """A table of a config.json; empty where there is none."""
    table = config.get(name)
    return table if isinstance(table, Mapping) else {}


def _config(made: Scenario) -> texts.Table:
    """The config.json of a scenario's model."""
    spec = made.file.model
    name = located(made, "model.hf_config", spec.hf_config) if spec.hf_config else str(spec.name)
    return models.config_of(Path(name) if spec.hf_config else name)


def _known(table: FrameworkTable) -> set[str]:
    return {row.option for row in table.every() if row.at == "args"}
