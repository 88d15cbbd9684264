"""Measured steps of FSDP and ZeRO: what a row says was run, and the same run played.

The software is read from the row: Composer (llm-foundry), torchtitan, IBM's and Lightning's FSDP scripts, DeepSpeed. It
decides which prefetch, attention kernel, optimizer and element types were used, as :class:`Recipe` says; nothing here
belongs to a GPU, a model or a case.

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
* MI300X, 20-30 % too fast: the best matmul rate is measured, attention and fp8 are estimates.
* llm-foundry's 13B on eight 40 GB cards and 70B on 64, 10-26 % too fast: gathered units churn in what little memory the
  model states leave. Peak bytes alone do not tell it: small models fill the same cards with activations and are met.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from clustersim import models
from clustersim.analysis import metrics
from clustersim.calibration.score import number
from clustersim.calibration.step_play import machine as machine_of
from clustersim.calibration.step_play import merged
from clustersim.calibration.step_rows import Row, measured_step, topology_of
from clustersim.compute import Execution, step_cost
from clustersim.compute.base import FLOAT8_RECIPES
from clustersim.device import Device, device_from_text
from clustersim.engine import simulate
from clustersim.memory import Training, memory
from clustersim.memory_use import MemoryUse
from clustersim.model import Model, StepCost
from clustersim.strategies import STRATEGIES
from clustersim.texts import Table

STEPS = 3
"""Steps played: the last two are averaged."""


@dataclass(frozen=True)
class Recipe:
    """How a code base trains.

    Parameters
    ----------
    name : for people. words : pattern that names it in a row's ``source`` and ``other``, in lower case.
    knobs : of ``[strategy]``. attention : kernel, None for PyTorch's choice. optimizer_impl : of Adam.
    alternate : its plain "selective" checkpointing repeats every second block, not every second product.
    first : what was timed is a run's first step, in which DeepSpeed records the order of modules and prefetches none.
    """

    name: str
    words: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    attention: str | None = None
    optimizer_impl: str = "foreach"
    alternate: bool = False
    first: bool = False


_FSDP1 = {"kind": "fsdp", "version": 1, "clip_grad_norm": True}
RECIPES = (
    # Composer: BACKWARD_POST, gradients reduced in every micro-batch, DecoupledAdamW in a Python loop.
    Recipe("Composer", r"llm-foundry", {**_FSDP1, "backward_prefetch": "BACKWARD_POST"}, "triton", "for-loop"),
    Recipe(
        "torchtitan", r"torchtitan", {"kind": "fsdp", "clip_grad_norm": True, "reduce_dtype": "fp32"}, alternate=True
    ),
    Recipe("IBM fsdp", r"maximizing-training", _FSDP1, alternate=True),
    # PyTorch 1.11: no prefetch unless a row says so, and no MixedPrecision yet: fp32 is gathered, autocast casts it.
    Recipe(
        "Lightning", r"lightning", {"kind": "fsdp", "version": 1, "backward_prefetch": "None", "param_dtype": "fp32"}
    ),
    # Its scripts train on 1,000 samples (--max_train_samples): one to three steps of 64 GPUs.
    Recipe("Hugging Face with DeepSpeed", r"bigscience", {"kind": "zero"}, optimizer_impl="fused", first=True),
    Recipe("DeepSpeed", r"deepspeed", {"kind": "zero"}, optimizer_impl="fused"),
    Recipe("FSDP", r"fsdp"),
    Recipe("ZeRO", r"zero", {"kind": "zero"}, optimizer_impl="fused"),
)
"""The first whose words a row holds is it."""


@dataclass(frozen=True)
class ShardedRun:
    """One measured step of a sharded strategy.

    Parameters
    ----------
    measured : float [s] per optimizer step; 0 if it was not asked for.
    knobs : the ``[strategy]`` table, for a step of ``accumulation`` micro-batches.
    checkpointing : none, full, selective, or ``alternate``: every second block in full.
    """

    measured: float
    model: Model
    device: Device
    topology: str
    nodes: int
    gpus: int
    accumulation: int
    dtype: str
    checkpointing: str
    optimizer: str | None
    compiled: bool
    float8_recipe: str
    recipe: Recipe
    knobs: Mapping[str, Any]


def is_sharded(row: Row) -> bool:
    """Whether a row's strategy is one of FSDP's or ZeRO's."""
    return row["strategy"].startswith(("fsdp", "hsdp", "zero"))


def read_sharded(row: Row, *, timed: bool = True) -> ShardedRun:
    """The run a row describes; ``timed`` False for its memory alone.

    Raises ValueError or a clustersim error that says what keeps it from being predicted.
    """
    if any(row.get(axis, "") not in {"", "1"} for axis in ("tp", "pp", "ep", "cp")):
        raise ValueError("tensor, pipeline, expert or context parallelism is not played")
    model = models.from_row(row)
    text = " ".join(row.get(column, "") for column in ("source", "strategy", "other")).lower()
    recipe = next(recipe for recipe in RECIPES if re.search(recipe.words, text))
    if not row["micro_batch_per_gpu"].strip():
        raise ValueError("the row does not say the micro-batch per GPU")
    precision = row["precision"].lower()
    dtype = next((word for word in ("fp8", "bf16", "fp16", "fp32") if word in precision), "")
    if not dtype:
        raise ValueError(f"precision {row['precision']!r} is not known")
    return ShardedRun(
        measured=measured_step(row, model) if timed else 0.0,
        model=model,
        device=device_from_text(row["gpu"]),
        topology=topology_of(row),
        nodes=int(number(row, "nodes")) if row["nodes"].strip() else 1,
        gpus=int(number(row, "gpus")),
        accumulation=int(number(row, "grad_accum")) if row["grad_accum"].strip() else 1,
        dtype=dtype,
        checkpointing=_checkpointing(row["act_ckpt"].lower(), recipe),
        optimizer="sgd" if "sgd" in precision else "adamw",
        compiled="torch.compile" in text and "no compile" not in text,
        float8_recipe=next((word for word in FLOAT8_RECIPES[::-1] if dtype == "fp8" and word in text), "tensorwise"),
        recipe=recipe,
        knobs=_knobs(row, text, recipe, dtype),
    )


def _checkpointing(words: str, recipe: Recipe) -> str:
    if words.startswith("full"):
        return "full"
    if words.startswith("selective"):
        return "alternate" if recipe.alternate and "op" not in words.split("selective")[1] else "selective"
    return "none"


def _knobs(row: Row, text: str, recipe: Recipe, dtype: str) -> Table:
    """The ``[strategy]`` table: the recipe's, and what the row itself says."""
    half = "fp16" if dtype == "fp16" else "fp32" if dtype == "fp32" else "bf16"
    knobs: Table = {"param_dtype": half, **recipe.knobs}
    knobs["micro_batch_size"] = int(number(row, "micro_batch_per_gpu"))
    if "fsdp2" in row["strategy"].lower() or knobs.get("kind", "fsdp") == "fsdp":
        return _fsdp(row, text, {"kind": "fsdp", **knobs})
    return {**knobs, "zero_optimization": _zero(row, text)}


def _fsdp(row: Row, text: str, knobs: Table) -> Table:
    knobs["kind"], strategy = "fsdp", row["strategy"].lower()
    if "reduce_dtype=fp32" in text or "fp32 reduce-scatter" in text:
        knobs["reduce_dtype"] = "fp32"
    if "backward_pre" in text:
        knobs["backward_prefetch"] = "BACKWARD_PRE"
    if "reshard_after_forward" in strategy:
        knobs["reshard_after_forward"] = "false" not in strategy
    if strategy.startswith("fsdp-grad-op"):
        knobs["sharding_strategy"] = "SHARD_GRAD_OP"
    if strategy.startswith("hsdp"):
        knobs["sharding_strategy"] = "HYBRID_SHARD"
    if "fp16 incl. sgd" in row["precision"]:
        knobs["orig_dtype"] = "fp16"
    knobs["cpu_offload"] = row.get("offload", "").startswith("cpu") or "cpu offload" in strategy
    return knobs


def _zero(row: Row, text: str) -> Table:
    """DeepSpeed's block as far as the row gives it, and its defaults."""
    stage = re.match(r"zero([123])", row["strategy"])
    if stage is None:
        raise ValueError(f"strategy {row['strategy']!r} names no ZeRO stage")
    block: Table = {"stage": int(stage.group(1))}
    if found := re.search(r"reduce_bucket(?:_size)? (\S+?)[,;\s]", text + " "):
        block["reduce_bucket_size"] = float(found.group(1))
    if "overlap_comm" in text:
        block["overlap_comm"] = True
    if "qwz" in text:
        block |= {"zero_quantized_weights": True, "zero_quantized_gradients": "qgz" in text}
    if found := re.search(r"hpz=(\d+)", text):
        block["zero_hpz_partition_size"] = int(found.group(1))
    offload = f"{row.get('offload', '')} {text}".lower()
    if re.search(r"optimizer cpu|cpu full|opt(\+param)? offload|cpu param\+optimizer|\+ cpu offload|^cpu", offload):
        block["offload_optimizer"] = {"device": "cpu"}
    if re.search(r"cpu full|param offload|cpu param", offload):
        block["offload_param"] = {"device": "cpu"}
    return block


def costs_of(run: ShardedRun) -> StepCost:
    """What a rank's step of this run costs."""

    def priced(checkpointing: str) -> StepCost:
        how = Execution(
            dtype=run.dtype,
            param_dtype=run.knobs["param_dtype"],
            state_dtype=run.knobs.get("orig_dtype", "fp32"),
            attention_kernel=run.recipe.attention,
            activation_checkpointing=checkpointing,
            optimizer=run.optimizer,
            optimizer_impl=run.recipe.optimizer_impl,
            implementation="compiled" if run.compiled else "eager",
            float8_recipe=run.float8_recipe,
        )
        return step_cost(run.model, run.device, run.knobs["micro_batch_size"], how)

    if run.checkpointing != "alternate":
        return priced(run.checkpointing)
    plain, full = priced("none"), priced("full")
    odd = np.arange(len(run.model.layers)) % 2 == 1
    return replace(
        plain,
        backward=np.where(odd, full.backward, plain.backward),
        backward_flops=np.where(odd, full.backward_flops, plain.backward_flops),
        backward_mix=(),
    )


def step_time(run: ShardedRun) -> float:
    """Seconds of one optimizer step. Micro-batches are alike: two are played, and the others take what the second
    adds."""
    first, *more = (_played(run, count) for count in ((1,) if run.accumulation == 1 else (1, 2)))
    return first + sum((run.accumulation - 1) * (second - first) for second in more)


def _played(run: ShardedRun, accumulation: int) -> float:
    strategy, config = _config(run, accumulation)
    topology, mesh = machine_of(run.topology, run.nodes, run.gpus)
    steps = 1 if run.recipe.first else STEPS
    program = merged(strategy.build(run.model, costs_of(run), mesh, config, steps, 0))
    figures = metrics.summary(simulate(program, topology, mesh), run.model, samples_per_step=1)
    return float(figures["step_time_s"])


def _config(run: ShardedRun, accumulation: int) -> tuple[Any, Any]:
    strategy = STRATEGIES[run.knobs["kind"]]
    return strategy, msgspec.convert({**run.knobs, "gradient_accumulation_steps": accumulation}, strategy.config)


def peak_memory(run: ShardedRun) -> MemoryUse:
    """Bytes of one GPU at the peak of this run's step."""
    strategy, config = _config(run, run.accumulation)
    _, mesh = machine_of(run.topology, run.nodes, run.gpus)
    if strategy.holding is None:
        raise ValueError(f"strategy {strategy.name!r} does not say what it holds")
    training = Training(
        micro_batch_size=run.knobs["micro_batch_size"],
        dtype=run.dtype,
        param_dtype=run.knobs["param_dtype"],
        activation_checkpointing="none" if run.checkpointing == "alternate" else run.checkpointing,
        optimizer=run.optimizer,
        optimizer_impl=run.recipe.optimizer_impl,
        compiled=run.compiled,
        holding=strategy.holding(run.model, mesh, config),
    )
    return memory(run.model, training)
