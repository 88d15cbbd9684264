"""Measured steps of FSDP and ZeRO: what a row says was run.

The software is read from the row: Composer (llm-foundry), torchtitan, IBM's and Lightning's FSDP scripts, DeepSpeed. It
decides which prefetch, attention kernel, optimizer and element types were used
(:class:`tests.evidence.software.Sharded`).

Far off, for reasons the rows show but no constant here could carry:

* DeepSpeed's tutorials on several DGX-2s, 50-80 % too fast: their network is not stated, and it bounds them. Forward of
  the 18B model takes 3.36 s, and 1.79 s once ZeRO++ halves the bytes of its all_gathers; that is 8 GB/s a machine.
* GPT-2 1.5B under ZeRO-1 on eight GPUs of a DGX-2, 35 % too fast: its tutorial leaves recomputation open, which alone
  would take a third more.
* SmolLM3 "without flash-attn", 41-44 % too slow as eager attention, which would need 130 GiB of an 80 GiB card. With
  PyTorch's own fused attention and checkpointing, which the row does not state, memory agrees (22-27 GiB) and time is
  25 % too short.
* Lightning's minGPT, 35-70 % too fast below 16 sequences: a step takes 0.75 s at any batch, 1.02 s with recomputation,
  so the host paces it (FSDP of PyTorch 1.11, some 6 ms a block and forward). One source cannot say which part.
* A GPT of 1T on 128 and 512 P4d GPUs, a quarter too fast: its card is full, its units are inside of checkpoints,
  and what it copies to the host for its checkpoints is not played.
* Its memory with recomputation, up to 23 % too low from 32 sequences on, where the GPU paces the step: FSDP 1 without a
  limit gathers as far ahead as the host runs, and the kept blocks of that are not counted.
* MI300X, 20-30 % too fast: the best matmul rate is measured, attention and fp8 are estimates.
* llm-foundry's 13B on eight 40 GB cards and 70B on 64, 10-26 % too fast: gathered units churn in what little memory the
  model states leave. Peak bytes alone do not tell it: small models fill the same cards with activations and are met.
"""

from __future__ import annotations

import re

import msgspec

from clustersim.calibrate.score import number
from clustersim.core.device_names import device_from_text
from clustersim.core.texts import Table
from clustersim.model.seconds import Execution
from clustersim.model.seconds.base import FLOAT8_RECIPES
from clustersim.training.strategies import STRATEGIES
from tests.evidence.generic import from_row
from tests.evidence.software import Row, ShardedTraining, sharded
from tests.evidence.step_rows import StepRun, measured_step, micro_batch, refuse_split, topology_of, whole


def is_sharded(row: Row) -> bool:
    """Whether a row's strategy is one of FSDP's or ZeRO's."""
    return row["strategy"].startswith(("fsdp", "hsdp", "zero"))


def words_of(row: Row) -> str:
    """What a row says of its software, in lower case."""
    return " ".join(row.get(column, "") for column in ("source", "strategy", "other")).lower()


def read_sharded(row: Row, *, timed: bool = True) -> StepRun:
    """The run a row describes; ``timed`` False for its memory alone.

    Raises ValueError or a clustersim error that says what keeps it from being predicted.
    """
    refuse_split(row)
    text = words_of(row)
    recipe = sharded(text)
    if recipe.vocab and not row.get("vocab"):
        row = {**row, "vocab": str(recipe.vocab)}
    model = from_row(row)
    samples = micro_batch(row, model)
    precision = row["precision"].lower()
    dtype = next((word for word in ("fp8", "bf16", "fp16", "fp32") if word in precision), "")
    if not dtype:
        raise ValueError(f"precision {row['precision']!r} is not known")
    measured = measured_step(row, model) if timed else 0.0
    knobs = _knobs(row, text, recipe, dtype) | {"micro_batch_size": samples}
    kind = str(knobs["kind"])
    return StepRun(
        measured=measured,
        model=model,
        device=device_from_text(row["gpu"]),
        topology=topology_of(row),
        nodes=whole(row, "nodes", 1),
        gpus=int(number(row, "gpus")),
        kind=kind,
        config=msgspec.convert(knobs, STRATEGIES[kind].config),
        accumulation=whole(row, "grad_accum", 1),
        how=_execution(row, text, recipe, knobs, dtype),
        alternate=_checkpointing(row, recipe) == "alternate",
    )


def _execution(row: Row, text: str, recipe: ShardedTraining, knobs: Table, dtype: str) -> Execution:
    policy = _checkpointing(row, recipe)
    return Execution(
        dtype=dtype,
        param_dtype=knobs["param_dtype"],
        state_dtype=knobs.get("orig_dtype", "fp32"),
        attention_kernel=recipe.attention,
        activation_checkpointing="none" if policy == "alternate" else policy,
        early_stop=recipe.early_stop,
        optimizer="sgd" if "sgd" in row["precision"].lower() else "adamw",
        optimizer_impl=recipe.optimizer_impl,
        implementation="compiled" if "torch.compile" in text and "no compile" not in text else "eager",
        float8_recipe=next((word for word in FLOAT8_RECIPES[::-1] if dtype == "fp8" and word in text), "tensorwise"),
    )


def _checkpointing(row: Row, recipe: ShardedTraining) -> str:
    """none, full, selective, or ``alternate``: every second block in full."""
    checkpoint_text = row["act_ckpt"].lower()
    if checkpoint_text.startswith("full"):
        return "full"
    if checkpoint_text.startswith("selective"):
        return "alternate" if recipe.alternate and "op" not in checkpoint_text.split("selective")[1] else "selective"
    return "none"


def _knobs(row: Row, text: str, recipe: ShardedTraining, dtype: str) -> Table:
    """The ``[strategy]`` table: the recipe's, and what the row itself says."""
    half = "fp16" if dtype == "fp16" else "fp32" if dtype == "fp32" else "bf16"
    knobs: Table = {"param_dtype": half, **recipe.knobs}
    if "fsdp2" in row["strategy"].lower() or knobs.get("kind", "fsdp") == "fsdp":
        return _fsdp(row, text, {"kind": "fsdp", **knobs})
    return {**knobs, "zero_optimization": _zero(row, text)}


def _fsdp(row: Row, text: str, knobs: Table) -> Table:
    knobs["kind"], strategy = "fsdp", row["strategy"].lower()
    if "reduce_dtype=fp32" in text or "fp32 reduce-scatter" in text:
        knobs["reduce_dtype"] = "fp32"
    if "cudamalloc retries" in text:
        knobs["alloc_retries"] = True
    if re.search("backward[_ ]pre", text):
        knobs["backward_prefetch"] = "BACKWARD_PRE"
    if "reshard_after_forward" in strategy:
        knobs["reshard_after_forward"] = "false" not in strategy
    if strategy.startswith("fsdp-grad-op"):
        knobs["sharding_strategy"] = "SHARD_GRAD_OP"
    if strategy.startswith("hsdp"):
        knobs["sharding_strategy"] = "HYBRID_SHARD"
    if "fp16 incl. sgd" in row["precision"].lower():
        knobs["orig_dtype"] = "fp16"
    knobs["cpu_offload"] = row.get("offload", "").startswith("cpu") or "cpu offload" in strategy
    return knobs


def _zero(row: Row, text: str) -> Table:
    """DeepSpeed's block as far as the row gives it, and its defaults."""
    stage = re.match(r"zero([123])", row["strategy"])
    if stage is None:
        raise ValueError(f"strategy {row['strategy']!r} names no ZeRO stage")
    block: Table = {"stage": int(stage.group(1))}
    if match := re.search(r"reduce_bucket(?:_size)? (\S+?)[,;\s]", text + " "):
        block["reduce_bucket_size"] = float(match.group(1))
    if "overlap_comm" in text:
        block["overlap_comm"] = True
    if "qwz" in text:
        block |= {"zero_quantized_weights": True, "zero_quantized_gradients": "qgz" in text}
    if match := re.search(r"hpz=(\d+)", text):
        block["zero_hpz_partition_size"] = int(match.group(1))
    offload = f"{row.get('offload', '')} {text}".lower()
    if re.search(r"optimizer cpu|cpu full|opt(\+param)? offload|cpu param\+optimizer|\+ cpu offload|^cpu", offload):
        block["offload_optimizer"] = {"device": "cpu"}
    if re.search(r"cpu full|param offload|cpu param", offload):
        block["offload_param"] = {"device": "cpu"}
    return block
