"""A row of measured hybrid-parallel steps as a scenario: ``[cluster] [model] [parallel] [strategy] [run]``.

The row says the degrees, the batch and the sizes; its stack and its recipe (:mod:`tests.evidence.software`)
fill what it does not say. A row that says too little is refused with the reason.
"""

from __future__ import annotations

import re

from clustersim import scenario
from clustersim.calibrate.score import number
from clustersim.core.device import device
from clustersim.core.device_names import device_from_text
from clustersim.core.texts import Table
from clustersim.scenario.run.parts import model_of
from tests.evidence.expert_rows import (
    BLOCK_RECIPES,
    GRAPH_KINDS,
    GRAPH_SCOPES,
    capacity,
    dispatching,
    graph_words,
    overlapping,
)
from tests.evidence.hybrid_models import completed, model_table, stands_in
from tests.evidence.software import PublishedRecipe, Row, SplitStack, recipe_of, stack_of
from tests.evidence.step_rows import whole

COLUMNS = ("tp", "pp", "cp", "ep", "dp", "vpp", "schedule", "config_group", "step_time_s")
"""What a table of hybrid-parallel steps has besides the columns of plain ones."""

STEPS = 2
"""Steps played per row: the second begins when the first is over, parameters gathered."""

_UNNAMED = {"libai": ("dgx-1v-1x100g", "V100-SXM2-32GB")}
"""Machines of sources that do not name theirs. LiBai's page is by the authors of ``dlperf``, whose 8-GPU V100 nodes
have one 100 Gb/s port; its 1-GPU rates and its batch sizes fit the 32 GB card (README of the measurements)."""

_SCHEDULES = {"interleaved-1f1b": "interleaved_1f1b", "zb1p": "zb_h1", "zb2p": "zb_2p"}
"""Names of the table -> of the schedules here."""

# Megatron-LM examples/sc21/run_table_1.sh: what the paper's table 1 does not print, by (TP, PP) of its rows.
_SC21 = {
    (1, 1): (16, 1),
    (2, 1): (16, 1),
    (4, 1): (16, 1),
    (8, 1): (8, 1),
    (8, 2): (4, 1),
    (8, 4): (2, 3),
    (8, 8): (2, 2),
    (8, 16): (1, 2),
}


def is_hybrid(row: Row) -> bool:
    """Whether a row is of a table of hybrid-parallel steps."""
    return row.keys() >= set(COLUMNS)


def scenario_table(row: Row) -> Table:
    """The tables of the scenario that a row describes.

    Raises ValueError or a clustersim error that says what keeps it from being played.
    """
    row = completed(row)
    _known_words(row)
    stack = stack_of(row)
    recipe = recipe_of(row)
    row = {**row, **recipe.columns}
    degrees = {name: whole(row, name, 1) for name in ("tp", "pp", "cp", "ep")}
    dtype, param_dtype = _dtypes(row)
    micro_batch, chunks = _batch(row)
    said = {} if row["fsdp"] == "1" else stack.parallel  # FSDP has its own overlap
    parallel = {
        "framework": stack.framework,
        **said,
        **degrees,
        "microbatches": _microbatches(row, micro_batch),
        **_pipeline(row, stack, degrees["pp"], chunks),
        **recipe.of(degrees["pp"] * chunks, whole(row, "layers")),
        **_lettered(row),
        **_exchanges(row, stack, degrees),
    }
    if row["experts"]:
        parallel = _with_experts(row, stack, recipe, parallel)
    if row["recompute"] == "none":
        parallel = {name: value for name, value in parallel.items() if not name.startswith("recompute_")}
    strategy, more = _strategy(row, stack)
    checkpointing, recomputed = _recompute(row)
    cluster = _cluster(row)
    model = model_table(row, stack, dtype, device(cluster["device"])) | checkpointing
    if "rowwise" in row["precision_recipe"]:
        model["float8_recipe"] = "rowwise"
    elif blocks := BLOCK_RECIPES.search(_recipe(row)):
        model["float8_recipe"] = blocks.group()
    if recipe.mtp and not re.search(r"mtp: no\b", row.get("other", "").lower()):
        model["options"]["mtp"] = recipe.mtp
    elif "m" in str(parallel.get("layout", "")):
        parallel["layout"] = parallel["layout"].replace("m", "")
    return {
        "cluster": cluster,
        "model": model,
        "parallel": parallel | more | recomputed,
        "strategy": {**strategy, "micro_batch_size": micro_batch, "param_dtype": param_dtype},
        "run": {"steps": STEPS, "jitter": 0.0, "optimizer": "adam", "optimizer_impl": "fused", **_graphs(row, recipe)},
    }


WORDS = {
    "tp_overlap": ("", "0", "1"),
    "dp_overlap": ("", "0", "1"),
    "seq_parallel": ("", "0", "1"),
    "fsdp": ("", "0", "1"),
    "recompute": ("", "none", "full", "selective"),
    "grad_reduce_dtype": ("", "fp32", "fp16", "bf16"),
    "offload": ("", "none", "cpu"),
    "precision_recipe": (
        "",
        "fp16",
        "bf16",
        "fp8-delayed",
        "fp8-current-scaling",
        "fp8-tensorwise dynamic",
        "fp8-rowwise",
        "fp8-blockwise",
        "mxfp8",
        "nvfp4",
    ),
}
"""What columns of settings may hold; each word is played, and another is nothing that may be passed over."""


LAYOUTS = re.compile(r"\d+ layers a stage|first and last stage hold one layer less|(?P<letters>[EtmL*|()\d]+)")
"""What a pipeline's stages hold: as many layers each, what :func:`_uneven` makes of those that do not divide, or
letters of Megatron's ``pipeline_model_parallel_layout``."""


STARVED = re.compile(r"functional_tests/.*_1node")
"""Sources of runs whose GPUs wait for samples. Megatron-LM's functional tests on one node of four GB200 take 0.22 to
0.3 s a micro-batch of four samples, be it four layers or twelve, dense or with experts, where two nodes take 0.04 to
0.1; steps of one run lie between 0.15 and 1.25 s, and the same ones are slow at another commit
(golden_values_dev_dgx_gb200 of gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer_1node, and of
gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_dist_optimizer_1node at 569ef465 and 089dacac)."""


def _known_words(row: Row) -> None:
    """Raise ValueError for a word of a setting that nobody reads."""
    if STARVED.search(row.get("source", "")):
        raise ValueError("its GPUs wait for samples, whatever the model; the input pipeline is not played")
    if named := re.search(r"optimizer (muon)", row.get("notes", "")):
        raise ValueError(f"optimizer {named.group(1)} is not played: its products orthogonalise every matrix in turn")
    for column, words in WORDS.items():
        word = row.get(column, "").strip()
        if word not in words:
            raise ValueError(f"{column} {word!r} is not known; known: {', '.join(filter(None, words))}")
    layout = row.get("pp_layout", "").strip()
    if layout and not LAYOUTS.fullmatch(layout):
        raise ValueError(f"pp_layout {layout!r} is neither layers a stage nor a layout in Megatron's letters")


def played_as(row: Row) -> tuple[str, ...]:
    """What is played in place of what the row says, a sentence each."""
    return stands_in(row)


def measured(row: Row, table: Table) -> float:
    """Seconds of the row's step, whose scenario is ``table``: as stated, or from its model FLOPs per second and GPU.

    Model FLOPs are counted as :meth:`clustersim.core.model.Model.flops_per_sample` does. Raises ValueError where
    neither is said.
    """
    if row["step_time_s"].strip():
        return number(row, "step_time_s")
    if not row["metric"].startswith("model_tflops_per_gpu"):
        raise ValueError(f"no step time follows from {row['metric']}: {row.get('notes', '')}")
    split = table["parallel"]
    cluster = table["cluster"]
    gpus = cluster["nodes"] * cluster["gpus_per_node"]
    replicas = gpus // (split["tp"] * split["cp"] * split["pp"])
    samples = table["strategy"]["micro_batch_size"] * split["microbatches"] * replicas
    flops = model_of(scenario.from_table(table)).flops_per_sample()
    return float(samples * flops / (number(row, "value") * 1e12 * gpus))


def _graphs(row: Row, recipe: PublishedRecipe) -> Table:
    """``cuda_graph`` of ``[run]``: the scopes a row names; an implementation without a scope captures whole layers.

    A row that says nothing of overlap or graphs says nothing of its settings, and has its recipe's. Raises ValueError
    for a word that is unknown.
    """
    if not row.get("cuda_graph", "").strip() and not row["ep_overlap"].strip():
        return {"cuda_graph": list(recipe.graphs)} if recipe.graphs else {}
    words = graph_words(row)
    unknown = [word for word in words if word not in {*GRAPH_KINDS, *GRAPH_SCOPES}]
    if unknown:
        raise ValueError(f"cuda_graph {unknown[0]!r} is not known; known: {', '.join((*GRAPH_KINDS, *GRAPH_SCOPES))}")
    scopes = [word for word in words if word in GRAPH_SCOPES]
    if words and not set(words) - GRAPH_KINDS:
        # Experts that drop no token are never captured: "moe cuda graph is only supported with drop-padding MoE".
        captured = ["moe"] if not row["experts"] or capacity(row) else ["moe_router", "moe_preprocess"]
        scopes = ["attn", "mlp", *captured]
    return {"cuda_graph": scopes} if scopes else {}


def _cluster(row: Row) -> Table:
    topology = row.get("topology", "")
    named = row.get("gpu", "")
    if not topology:
        source = row["case_id"].split("-")[0]
        if source not in _UNNAMED:
            raise ValueError("the row does not say which topology")
        topology, named = _UNNAMED[source]
    nodes = whole(row, "nodes")
    gpus = whole(row, "gpus")
    if gpus % nodes:
        raise ValueError(f"{gpus} GPUs do not divide over {nodes} nodes")
    name = device_from_text(named).name
    return {"topology": topology, "nodes": nodes, "gpus_per_node": gpus // nodes, "device": name}


def _dtypes(row: Row) -> tuple[str, str]:
    """Of the matrix products, and of the parameters: all of these stacks train converted 16-bit models."""
    recipe = _recipe(row)
    products = next((word for word in ("fp8", "bf16", "fp16") if word in recipe), None)
    if BLOCK_RECIPES.search(recipe):
        products = "fp8"  # the recipe says which of 8 and 4 bits
    if products is None:
        raise ValueError(f"precision {recipe!r} is not known")
    return products, "fp16" if products == "fp16" else "bf16"


def _recipe(row: Row) -> str:
    return (row.get("precision_recipe") or row["precision"]).lower()


def _batch(row: Row) -> tuple[int, int]:
    """Samples of a micro-batch, and chunks of a pipeline rank."""
    chunks = whole(row, "vpp", 1)
    if row["micro_batch_per_gpu"].strip():
        return whole(row, "micro_batch_per_gpu"), chunks
    key = (whole(row, "tp", 1), whole(row, "pp", 1))
    if "2104.04473" in row.get("source", "") and key in _SC21:
        return _SC21[key]
    raise ValueError("the row does not say the micro-batch per GPU")


def _microbatches(row: Row, micro_batch: int) -> int:
    if row["grad_accum"].strip():
        return whole(row, "grad_accum")
    samples = whole(row, "global_batch")
    dp = whole(row, "dp", 1)
    if samples % (micro_batch * dp):
        raise ValueError(f"global batch {samples} is no multiple of {micro_batch} samples on {dp} replicas")
    return samples // (micro_batch * dp)


def _pipeline(row: Row, stack: SplitStack, stages: int, chunks: int) -> Table:
    if stages == 1:
        return {}
    said = row["schedule"]
    if not said and chunks > 1:
        said = "interleaved_1f1b"
    named: Table = {"vpp": chunks, "schedule": _SCHEDULES.get(said, said or "1f1b")}
    if said.startswith("zb"):
        named["optimizer_post_validation"] = True
    layers = whole(row, "layers")
    if found := re.fullmatch(r"(\d+) layers a stage", row.get("pp_layout", "")):
        return named if int(found.group(1)) * stages == layers else named | _uneven(layers, stages)
    if stack.framework == "megatron" and layers % (stages * chunks):
        return named | _uneven(layers, stages * chunks)
    return named


def _lettered(row: Row) -> Table:
    """The layout that a row gives in letters."""
    found = LAYOUTS.fullmatch(row.get("pp_layout", "").strip())
    return {"layout": found.group()} if found and found["letters"] else {}


def _uneven(layers: int, stages: int) -> Table:
    """Layers that do not divide: embedding and loss count as a layer each, if they divide so (Megatron's
    ``account_for_*_in_pipeline_split``, the zero-bubble fork's ``--num-layers`` less two); else as even as they go."""
    each, more = divmod(layers + 2, stages)
    if not more:
        return {"layout": [each - 1, *[each] * (stages - 2), each - 1]}
    each, more = divmod(layers, stages)
    return {"layout": [each + (0 < i <= more) if more < stages - 1 else each + (i < more) for i in range(stages)]}


def _exchanges(row: Row, stack: SplitStack, degrees: dict[str, int]) -> Table:
    found: Table = {} if degrees["tp"] == 1 or row["experts"] else dict(stack.tensor)
    if row["tp_overlap"] == "0" or row["seq_parallel"] == "0":
        found.pop("tp_overlap", None)
    if degrees["tp"] > 1 and (row["seq_parallel"] or row["experts"]):
        # Megatron refuses a mixture of experts without it.
        found["sequence_parallel"] = row["seq_parallel"] == "1" or bool(row["experts"])
    if row["tp_overlap"] == "1":
        found["tp_overlap"] = "async_tp" if stack.framework == "torchtitan" else "userbuffers"
    if "tensorwise" in row["precision_recipe"] and found.get("sequence_parallel"):
        found["float8_tp"] = stack.framework == "torchtitan"
    if degrees["ep"] > 1:
        found["etp"] = whole(row, "etp", degrees["tp"] if stack.cuts_experts else 1)
        balanced = "forced balanced" in row.get("other", "")
        found["routing"] = {"kind": "balanced" if balanced else "uniform"}
    return found


def _with_experts(row: Row, stack: SplitStack, recipe: PublishedRecipe, parallel: Table) -> Table:
    """``[parallel]`` with what the row says of its experts; without a dispatcher where nothing is sent."""
    others = {name: value for name, value in parallel.items() if name not in {"dispatcher", "flex_backend"}}
    if "functional tests" in row["framework"] and row["topk"] == "1":
        others["load_balancing"] = "sinkhorn"  # tests/functional_tests/test_cases/moe/*/model_config.yaml
    return {**others, **dispatching(row, parallel), **overlapping(row, stack, recipe), **capacity(row)}


def _recompute(row: Row) -> tuple[Table, Table]:
    """What backward recomputes, in ``[model]`` where that has a word for it, else in ``[parallel]``."""
    said = row["recompute"]
    detail = row["recompute_detail"]
    if said == "full":
        if few := re.search(r"(\d+) layers a stage", detail):
            more = {"recompute_granularity": "full", "recompute_method": "block"}
            return {}, more | {"recompute_num_layers": int(few.group(1))}
        return {"activation_checkpointing": "full"}, {}
    if said == "selective" and "operator" in detail:
        return {"activation_checkpointing": "selective"}, {}
    if said == "selective":
        return {}, {"recompute_granularity": "selective", "recompute_modules": detail.split() or ["core_attn"]}
    return {}, {}


def _strategy(row: Row, stack: SplitStack) -> tuple[Table, Table]:
    """``[strategy]``, and what belongs to it in ``[parallel]``."""
    reduced = row["grad_reduce_dtype"]
    stage = whole(row, "zero_stage", 0) if row["zero_stage"].strip() not in {"", "0"} else 0
    offloaded = {"offload_optimizer": {"device": "cpu"}} if row.get("offload") == "cpu" else {}
    if offloaded and (stage < 2 or row["fsdp"] == "1"):
        raise ValueError("offload 'cpu' is played with ZeRO-2 and ZeRO-3 alone")
    if row["fsdp"] == "1":
        narrow = {"float8_all_gather": True} if "fp8 all-gather" in row["other"] else {}
        return {"kind": "fsdp", "reduce_dtype": reduced or "fp32", **narrow}, {}
    if stage > 1:
        return {"kind": "zero", "zero_optimization": {"stage": stage, **offloaded}, **stack.zero}, {}
    # Without a distributed optimizer every rank has all parameters, and there is nothing to gather.
    more: Table = {"use_distributed_optimizer": True} if stage else {"overlap_param_gather": False}
    if reduced:
        more["grad_reduce_in_fp32"] = reduced == "fp32"
    if row["framework"] == "InternEvo":  # overlap_sync_param is off in its configs/7B_sft.py, of the table's batch
        more["overlap_param_gather"] = False
    if row["dp_overlap"] == "0":
        more |= {"overlap_grad_reduce": False, "overlap_param_gather": False}
    elif row["dp_overlap"] == "1":
        more["overlap_grad_reduce"] = True  # whatever the stack has where nobody says
    return {"kind": "ddp", **({"framework": "megatron"} if stack.framework == "megatron" else {})}, more
