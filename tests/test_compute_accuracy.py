"""The compute model against published measurements: GEMM tables, transformer steps, convolutional networks.

``pytest -s tests/test_compute_accuracy.py`` prints every figure; the bounds are what was reached, with a little room.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gemm_table import Fit, check, read_gemms
from kernel_times import time_in

from clustersim.core.device import device
from clustersim.core.device_names import device_from_text
from clustersim.core.model import Kernel, Model
from clustersim.core.paths import data_path
from clustersim.model import convnet, from_hf, transformer
from clustersim.model.seconds import CONSTANTS, Execution, setting, step_cost
from tests.tables import table_rows

SHARED = Path(__file__).parents[1].parent / "shared" / "measurements"
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not SHARED.is_dir(), reason="the measurement tables are not beside the checkout"),
]
CONFIGS = data_path("data") / "models"
Row = dict[str, str]


def table(name: str) -> list[Row]:
    return table_rows(SHARED / name)


def single_gpu_rows(source: str) -> Iterator[Row]:
    for row in table("training_steps.csv"):
        if row["case_id"].startswith(source) and row["gpus"] == "1" and row["strategy"].startswith("single"):
            yield row


def report(what: str, errors: list[float]) -> float:
    """Print mean, median and bias of relative errors; returns the mean absolute error."""
    e = np.array(errors)
    size = np.abs(e)
    print(f"{what}: {len(e)} rows, mean {size.mean():.1%}, median {np.median(size):.1%}, bias {e.mean():+.1%}")
    return float(size.mean())


# ------------------------------------------------------------------------------------------------------------- GEMMs


@pytest.fixture(scope="module")
def fits() -> list[Fit]:
    found = check(table("compute_facts.csv"))
    print("", *found, sep="\n")
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "kind", "median"),
    [
        ("A100-SXM4-80GB", "fp16", "cuBLASLt", 0.063),
        ("H100-SXM5-80GB", "fp8", "cuBLASLt", 0.025),
        ("H200-SXM5-141GB", "fp8", "cuBLASLt", 0.05),
        ("H100-SXM5-80GB", "bf16", "XLA", 0.065),
        ("A100-PCIe-80GB", "bf16", "matmul", 0.042),
        ("H100-SXM5-80GB", "fp32", "linear", 0.05),
        ("A100-PCIe-80GB", "fp32", "linear", 0.055),
        ("A100-PCIe-40GB", "fp32", "linear", 0.06),
        ("V100-PCIe-32GB", "fp32", "linear", 0.045),
        ("L4", "fp32", "linear", 0.075),
        ("H100-SXM5-80GB", "fp32", "bmm", 0.17),
        ("A100-PCIe-80GB", "fp32", "bmm", 0.16),
        # Two sources disagree: the table tops out a fifth under the best matmul another one measured.
        ("B200-SXM-180GB", "bf16", "matmul", 0.35),
    ],
)
def test_gemm_tables_are_met_without_a_fit_per_device(
    fits: list[Fit], name: str, dtype: str, kind: str, median: float
) -> None:
    (fit,) = [f for f in fits if (f.device, f.dtype) == (name, dtype) and f.table.endswith(kind)]
    assert fit.median_abs < median


def weight_gradients(gpu: str) -> Iterator[tuple[Kernel, int, float]]:
    """Megatron's products that add to kept gradients, bytes of an element of these, and seconds (SimuMax's tables)."""
    size = {"fp32": 4, "bf16": 2}
    for row in table("compute_facts.csv"):
        said = dict(re.findall(r"(\w+)=(\w+)", row["shape_or_params"]))
        if "SimuMax" not in row["source"] or not row["device"].startswith(gpu) or said.get("accumulate") != "True":
            continue
        grouped = "ng" in said
        rows, n, k = (int(said[x]) for x in ("MNK" if grouped else "knm"))
        count = int(said.get("ng", 1))
        flops = 2.0 * rows * n * k * count
        kernel = Kernel("w", "gemm", m=rows, n=n, k=k, flops=flops, backward_flops=2 * flops, repeat=count)
        wide = size[said["main_grad_dtype" if grouped else "out_dtype"]]
        yield kernel, wide, flops / (float(row["value"]) * 1e12)


def added_and_written() -> tuple[dict[bool, list[float]], list[float]]:
    """Relative errors of A100's weight gradients, by whether they are grouped; and as if all were written, not added.

    Grouped kernels by themselves; what they keep in a step of a mixture is the constant's own evidence.
    """
    alone = replace(CONSTANTS, grouped=1.0)
    where = setting(device("A100-PCIe-80GB"), Execution("bf16", "bf16"), alone)
    errors: dict[bool, list[float]] = {True: [], False: []}
    plain = []
    for kernel, size, seconds in weight_gradients("A100"):
        added = time_in(replace(where, summed_bytes=size), kernel, 1, "W")[0]
        errors[kernel.repeat > 1].append(added / seconds - 1)
        plain.append(time_in(where, kernel, 1, "W")[0] / seconds - 1)
    return errors, plain


def test_products_that_add_to_kept_gradients_are_met_on_a_gpu_whose_others_are() -> None:
    errors, _ = added_and_written()
    assert report("weight gradients, dense", errors[False]) < 0.06
    assert report("weight gradients, grouped", errors[True]) < 0.05


@pytest.mark.xfail(strict=True, reason="1.49 times since the law's products of one shape for all arithmetics")
def test_products_that_add_are_told_from_written_ones_by_half_as_much_error_again() -> None:
    errors, plain = added_and_written()
    assert report("the same as if they were written", plain) > 1.5 * report("weight gradients, dense", errors[False])


def test_the_reader_finds_every_product_of_the_table() -> None:
    gemms = read_gemms(table("compute_facts.csv"))
    assert len(gemms) > 6900
    assert all(0 < g.seconds < 10 for g in gemms)


# ------------------------------------------------------------------------------------------------------ transformers


def neusight_model(row: Row) -> Model | None:
    """BERT with its pre-training head, GPT-2/3 and OPT, all eager; the Switch rows give no layers."""
    seq = int(row["seq_len"])
    if row["model"].startswith("BERT"):
        return from_hf(CONFIGS / "bert-large-uncased.json", seq_len=seq, implementation="eager", head="pretraining")
    if row["model"].startswith("OPT"):
        return from_hf(CONFIGS / "opt-1.3b.json", seq_len=seq, implementation="eager")
    if row["model"].startswith("GPT"):
        config = json.loads((CONFIGS / "gpt2-large.json").read_text())
        shape = {"n_embd": "d_model", "n_head": "heads", "n_layer": "layers", "n_positions": "seq_len"}
        config |= {key: int(row[column]) for key, column in shape.items()}
        return from_hf(config, seq_len=seq, implementation="eager")
    return None


def test_fp32_eager_transformers_are_within_seven_percent() -> None:
    errors = []
    for row in single_gpu_rows("neusight"):
        model = neusight_model(row)
        if model is None:
            continue
        part = device_from_text(row["gpu"])
        cost = step_cost(model, part, int(row["micro_batch_per_gpu"]), Execution(dtype="fp32", optimizer=None))
        predicted = [1e3 * float(cost.forward.sum()), 1e3 * float(cost.backward.sum())]
        measured = [float(ms) for ms in re.findall(r"([\d.]+) ms", row["other"])[:2]]
        errors.append(sum(predicted) / float(row["value"]) - 1)
        shown = "  ".join(f"{p:7.1f} of {m:7.1f} ms" for p, m in zip(predicted, measured, strict=True))
        print(f"{row['case_id']} {row['model'][:12]:12s} {part.name:16s} {shown}  {errors[-1]:+.1%}")
    assert len(errors) == 11
    assert report("neusight, fp32 eager, one GPU", errors) < 0.05


def bert_error(row: Row) -> float:
    large = "base" not in row["model"].lower()
    squad = "squad" in (row["model"] + row["other"]).lower()
    seq = int(row["seq_len"] or 384)
    head = {"head": "qa"} if squad else {"head": "pretraining", "head_positions": 20 if seq == 128 else 80}
    config = CONFIGS / f"bert-{'large' if large else 'base'}-uncased.json"
    model = from_hf(config, seq_len=seq, implementation="eager", **head)
    part = device_from_text(row["gpu"])
    batch = int(row["micro_batch_per_gpu"])
    accumulate = int(row["grad_accum"] or 1)
    amp = "AMP" in row["precision"]
    # NVIDIA's scripts convert the model (apex O2); TF32 is on by default in their containers.
    dtype = "fp16" if amp else "tf32" if part.sm >= 80 else "fp32"
    cost = step_cost(
        model, part, batch, Execution(dtype=dtype, param_dtype="fp16" if amp else "fp32", optimizer="adam")
    )
    seconds = accumulate * float(cost.forward.sum() + cost.backward.sum()) + cost.optimizer + cost.step_overhead
    error = seconds / (batch * accumulate / float(row["value"])) - 1
    print(f"{row['case_id']} {row['model'][:18]:18s} {dtype} s{seq} b{batch} {part.name:16s} {error:+.1%}")
    return error


def test_single_gpu_bert_of_deep_learning_examples_in_pytorch() -> None:
    errors = [bert_error(row) for row in single_gpu_rows("lambda") if row["model"].startswith("bert")]
    assert len(errors) == 16
    assert report("lambda BERT, one GPU, PyTorch", errors) < 0.09


def test_llm_foundry_steps_on_one_node_are_met_by_compute_alone() -> None:
    """FSDP on 8 GPUs hides its communication: compute, optimizer shard and gradient copies make the step."""
    errors = []
    for row in table("training_steps.csv"):
        if not row["case_id"].startswith("mosaic") or int(row["gpus"]) != 8 or int(row["layers"]) > 36:
            continue  # the two largest models leave no memory on 8 GPUs and slow down
        layers, width, heads, seq, vocab = (int(row[k]) for k in ("layers", "d_model", "heads", "seq_len", "vocab"))
        model = transformer(layers, width, heads, seq, vocab, implementation="flash")
        part = device_from_text(row["gpu"])
        passes = int(row["grad_accum"])
        how = Execution(
            dtype="fp8" if "fp8" in row["precision"] else "bf16",
            param_dtype="bf16",
            attention_kernel="triton",
            activation_checkpointing=row["act_ckpt"],
        )
        cost = step_cost(model, part, int(row["micro_batch_per_gpu"]), how)
        copies = 10.0 * model.parameters / part.stream_rate()
        micro = float(cost.forward.sum() + cost.backward.sum()) + copies
        seconds = passes * micro + cost.optimizer / 8 + 0.025
        measured = int(row["global_batch"]) * seq / (8 * float(row["value"]))
        errors.append(seconds / measured - 1)
    assert len(errors) > 60
    # 0.052 until attention's law had 195 published rows of its own, and Triton's on A100 at 32,768 tokens 3 % more.
    assert report("llm-foundry on 8 GPUs, compute alone", errors) < 0.054


# ---------------------------------------------------------------------------------------------------------- convnets


NETS = {
    "resnet-50": "resnet50",
    "resnet50": "resnet50",
    "resnet101": "resnet101",
    "resnext50": "resnext50_32x4d",
    "resnext101_32x8d": "resnext101_32x8d",
    "resnext101-32x4d": "resnext101_32x4d",
    "vgg16": "vgg16",
    "alexnet": "alexnet",
    "resnet-152": "resnet152",
}


def convnet_error(row: Row, *, implementation: str = "eager") -> float | None:
    name = next((NETS[key] for key in NETS if row["model"].lower().startswith(key)), None)
    if name is None:
        return None
    part = device_from_text(row["gpu"])
    batch = int(row["micro_batch_per_gpu"])
    dtype = "fp16" if "AMP" in row["precision"] else "tf32" if "TF32" in row["precision"] and part.sm >= 80 else "fp32"
    cost = step_cost(
        convnet(name), part, batch, Execution(dtype=dtype, optimizer="sgd_momentum", implementation=implementation)
    )
    seconds = float(cost.forward.sum() + cost.backward.sum()) + cost.optimizer + cost.step_overhead
    measured = float(row["value"]) if row["unit"] == "s" else batch / float(row["value"])
    error = seconds / measured - 1
    print(f"{row['case_id']} {name:18s} {dtype} b{batch:<4d} {part.name:16s} {1e3 * measured:7.1f} ms {error:+.1%}")
    return error


@pytest.mark.parametrize(("source", "worst"), [("ptddp", 0.12), ("lambda", 0.12)])
def test_single_gpu_convnets_in_pytorch_without_an_anchor(source: str, worst: float) -> None:
    errors = [e for row in single_gpu_rows(source) if (e := convnet_error(row)) is not None]
    report(f"{source} convnets, one GPU", errors)
    assert max(map(abs, errors)) < worst


def test_resnet50_of_deep_learning_examples_on_v100_is_within_a_fifth() -> None:
    """Their 16-bit networks run channels last with fused norms."""
    errors = []
    for row in single_gpu_rows("dle"):
        if "PyTorch" in row["other"]:
            fast = "compiled" if "AMP" in row["precision"] else "eager"
            if (error := convnet_error(row, implementation=fast)) is not None:
                errors.append(error)
    report("dle convnets, V100", errors)
    assert max(map(abs, errors)) < 0.2


def test_tensorflow_benchmarks_on_pascal_whose_rates_are_family_estimates() -> None:
    rows = [row for row in single_gpu_rows("tfps") if "P100" in row["gpu"] and "synth" in row["other"]]
    errors = [e for row in rows if (e := convnet_error(row)) is not None]
    assert report("tfps convnets, P100", errors) < 0.12
