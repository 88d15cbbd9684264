"""What a row of a training-step table says was run, in the words of a scenario.

Columns: ``model, layers, d_model, heads, seq_len, vocab, precision, gpu, nodes, gpus, topology, strategy,
micro_batch_per_gpu, grad_accum, global_batch, act_ckpt, other, metric, value, unit, notes``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from clustersim.calibrate.score import number
from clustersim.core.device import Device
from clustersim.core.device_names import device_from_text
from clustersim.core.model import Model
from clustersim.core.texts import Table
from clustersim.model.seconds import Execution
from clustersim.training.strategies import STRATEGIES, StrategyConfig
from tests.evidence.generic import from_row
from tests.evidence.software import PYTORCH, Framework, Row, framework

COLUMNS = (
    "case_id",
    "model",
    "precision",
    "gpu",
    "gpus",
    "nodes",
    "strategy",
    "micro_batch_per_gpu",
    "metric",
    "value",
)
PLAYED = {
    "single": "single",
    "ddp": "ddp",
    "dp (torch DataParallel)": "data_parallel",
    "ps (parameter_server, local_parameter_device=cpu)": "parameter_server",
    "allreduce (replicated, NCCL)": "ddp",
}
"""Strategies that can be predicted, by the start of the column: what they are here. TensorFlow's ``replicated`` reduces
every gradient by itself, as DDP would with buckets of one tensor."""

ANY_MACHINE = "hgx-h100"
"""Where a one-GPU row is played whose source does not name the machine: nothing leaves the GPU."""

ONE_TENSOR_MB = 1e-6
"""A bucket limit that every tensor reaches."""

_DTYPES = {word: word for word in ("fp8", "bf16")} | {"tf32 off": "fp32", "amp": "fp16"}
_DTYPES |= {word: word for word in ("fp16", "tf32", "fp32")}
"""Element types of matrix products by what a row's precision says of them; the first that it says counts."""


def publisher(row: Row) -> str:
    """Whose table a row is from: what its ``case_id`` begins with."""
    return row["case_id"].split("-")[0]


COLLECTED = {"lightning": "lightning", "fsdp on aws": "pytorch_aws", "maximizing-training": "pytorch_ibm"}
"""Whose rows ``fsdpmisc`` holds, by what their ``source`` says in lower case; the rest are of few rows each."""


def origin(row: Row) -> str:
    """Who measured a row: its publisher, or of a table that was put together from several, the one it is from."""
    name = publisher(row)
    said = row["source"].lower() if name == "fsdpmisc" else ""
    return next((whose for word, whose in COLLECTED.items() if word in said), name)


def topology_of(row: Row) -> str:
    """The row's machine; 16 V100s in one node are a DGX-2's, whatever the row says."""
    name = row.get("topology", "")
    return "dgx-2" if name.startswith("dgx-1v") and row.get("gpus_per_node") == "16" else name


@dataclass(frozen=True)
class StepRun:
    """One measured training step, whichever strategy shared it out.

    Parameters
    ----------
    measured : float [s] per optimizer step, all accumulation included; 0 if it was not asked for.
    model, device : what ran on what. topology : name of the machine's file, empty if the row does not say.
    nodes, gpus : in use. kind : of the strategy. config : its knobs, of one pass a step.
    accumulation : passes per step.
    how : how a pass is computed; its optimizer is None where the measurement stops after backward.
    framework : the software, where the row names it.
    alternate : every second block is recomputed in full.
    """

    measured: float
    model: Model
    device: Device
    topology: str
    nodes: int
    gpus: int
    kind: str
    config: StrategyConfig
    accumulation: int
    how: Execution
    framework: Framework = PYTORCH
    alternate: bool = False


def read(row: Row) -> StepRun:
    """The run a row describes. Raises ValueError or a clustersim error that says what keeps it from being predicted."""
    kind = next((kind for name, kind in PLAYED.items() if row["strategy"].startswith(name)), None)
    if kind is None:
        raise ValueError(f"strategy {row['strategy']!r} is not played; played: {', '.join(PLAYED)}")
    refuse_split(row)
    if row.get("offload", "") not in {"", "none"}:
        raise ValueError(f"offload {row['offload']!r} is not played")
    software = framework(row)
    model = from_row(row, implementation=software.implementation, gathers_masked=software.gathers_masked)
    notes_text = f"{row.get('other', '')} {row.get('notes', '')}".lower()
    precision = _precision(row, model)
    compiled = software.compiled or _compiled(notes_text) or (model.sample == "image" and software.channels_last)
    measured = measured_step(row, model)
    device = device_from_text(row["gpu"])
    gpus = whole(row, "gpus", 1)
    param_dtype = _param_dtype(precision.lower(), software)
    knobs: Table = {"micro_batch_size": micro_batch(row, model), "param_dtype": param_dtype}
    how = Execution(
        dtype=_dtype(precision, row["gpu"]),
        param_dtype=param_dtype,
        activation_checkpointing="full" if row.get("act_ckpt", "") in {"full", "yes", "true"} else "none",
        optimizer=_optimizer(row, notes_text, model),
        implementation="compiled" if compiled else "eager",
    )
    if kind == "ddp":
        knobs["bucket_cap_mb"] = _bucket(row, software, model)
    config = STRATEGIES[kind].config(**knobs)
    topology = topology_of(row) or (ANY_MACHINE if gpus == 1 else "")
    passes = whole(row, "grad_accum", 1)
    return StepRun(measured, model, device, topology, whole(row, "nodes", 1), gpus, kind, config, passes, how, software)


def refuse_split(row: Row) -> None:
    """Raise ValueError for a row whose model is split."""
    if any(row.get(axis, "") not in {"", "1"} for axis in ("tp", "pp", "ep", "cp")):
        raise ValueError("tensor, pipeline, expert or context parallelism is not played")


FULL_RECOMPUTATION = 4 / 3
"""Operations a GPU executes over those of the model where every block's forward runs twice."""


def measured_step(row: Row, model: Model) -> float:
    """Seconds of one optimizer step, from whatever the row measured. Raises ValueError where that is no step time.

    ``hw_tflops_per_gpu`` counts what is executed, recomputation included, ``tflops_per_gpu`` the model's own.
    """
    metric = row["metric"]
    unit = row.get("unit", "")
    value = number(row, "value")
    if metric.startswith(("iteration_time", "fwd+bwd time", "step_time")):
        return value * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
    if match := re.fullmatch(r"train_runtime_(\d+)_steps", metric):
        return value / int(match.group(1))
    local = micro_batch(row, model) * whole(row, "grad_accum", 1)
    if metric in {"tflops_per_gpu", "hw_tflops_per_gpu"}:
        again = FULL_RECOMPUTATION if metric.startswith("hw") and row.get("act_ckpt", "") == "full" else 1.0
        return local * model.flops_per_sample() * again / (value * 1e12)
    if metric.startswith("tokens_per_s_per_gpu"):
        return local * model.seq_len / value
    if metric.startswith("throughput_per_gpu"):
        return local / value
    if metric.startswith("throughput"):
        by_batch = row.get("global_batch") and not _in_tokens(row)
        samples = number(row, "global_batch") if by_batch else local * whole(row, "gpus", 1)
        return samples * (model.seq_len if _counts_within(unit, model) else 1) / value
    raise ValueError(f"metric {metric!r} does not say how long a step takes")


def _counts_within(unit: str, model: Model) -> bool:
    """Whether a throughput counts tokens, mel frames or audio samples, of which one sample of the batch has many."""
    return unit.startswith(("tok", "mel")) or (model.sample == "clip" and unit == "samples/s")


def whole(row: Row, column: str, default: int | None = None) -> int:
    """A whole number of a row. Raises ValueError where the row does not say it and there is no default."""
    if row.get(column, "").strip():
        return int(number(row, column))
    if default is None:
        raise ValueError(f"the row does not say {column}")
    return default


def _in_tokens(row: Row) -> bool:
    """Whether a row's batches are counted in tokens."""
    return "batch unit = tokens" in row.get("notes", "")


def micro_batch(row: Row, model: Model) -> int:
    """Samples of a rank in one pass. Raises ValueError where the row does not say."""
    if not row["micro_batch_per_gpu"].strip():
        raise ValueError("the row does not say the micro-batch per GPU")
    return int(number(row, "micro_batch_per_gpu")) // (model.seq_len if _in_tokens(row) else 1)


def _precision(row: Row, model: Model) -> str:
    """What a row says, but for Lambda's speech networks: the AMP and fp32 runs of a V100 take the same time within 1 %,
    and those of an A100 within 6 %, so that the flag did not reach NVIDIA's scripts."""
    ignored = model.sample == "clip" and "lambdal/" in row.get("source", "")
    return "fp32/TF32" if ignored else row["precision"]


def _dtype(precision: str, gpu: str) -> str:
    """Element type of the matrix products.

    ``fp32/TF32`` means what the GPU's libraries did by default: TF32 from Ampere on.
    """
    text = precision.lower()
    if text == "fp32/tf32":
        return "tf32" if device_from_text(gpu).sm >= 80 else "fp32"
    for word, dtype in _DTYPES.items():
        if word in text:
            return dtype
    if not text:
        raise ValueError("the row does not say the precision")
    raise ValueError(f"precision {precision!r} is not known")


def _param_dtype(precision: str, software: Framework) -> str:
    """What parameters are in while the model computes: fp32 unless the run or its framework converts the model."""
    if "pure" in precision:
        return "bf16"
    half = "amp" in precision or "fp16" in precision
    return "fp16" if half and software.half_parameters else "fp32"


def _compiled(notes_text: str) -> bool:
    stripped = re.sub(r"(no|before|without) (torch\.)?compile", "", notes_text)
    return re.search(r"torch\.compile\b|\bcompiled\b", stripped) is not None


def _optimizer(row: Row, notes_text: str, model: Model) -> str | None:
    if "no optimizer" in row["metric"]:
        return None
    if re.search(r"\blamb\b", notes_text):
        return "lamb"
    return "sgd_momentum" if model.sample == "image" else "adam"


def _bucket(row: Row, software: Framework, model: Model) -> float | None:
    other_text = row.get("other", "")
    if "replicated" in row["strategy"]:
        return ONE_TENSOR_MB
    match = re.search(r"bucket_cap_mb[ =](\d+)\b(?! *\(?default)", other_text)
    if match is not None and "default" not in other_text:
        return float(match.group(1))
    if software.bucket_cap_mb is None:
        return None
    # No bucket needs to be larger than the model.
    return min(software.bucket_cap_mb, model.parameters * 4 / 2**20 + 1)
