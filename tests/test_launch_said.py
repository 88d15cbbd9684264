"""Everything of a scenario that changes what is played is written into a framework's files, or named."""

from functools import cache
from typing import Literal, get_args, get_origin

import pytest
from msgspec.structs import fields

from clustersim import scenario
from clustersim.core.errors import ClusterSimError
from clustersim.files import launch as exchange
from clustersim.files.launch.table import load
from clustersim.scenario.file.schema import Model, Run
from clustersim.studies.what_if.folded import folded
from clustersim.training.parallel import ParallelConfig
from clustersim.training.strategies import STRATEGIES

FEW = {"model.options": {"layers": 4}, "run.steps": 1}
BASES = {
    "torchtitan": ("torchtitan", "fsdp_llama3_8b_64x8_h100", {"cluster.nodes": 1, **FEW}),
    "torchtitan, experts in 8 bits": (
        "torchtitan",
        "fsdp_llama3_8b_64x8_h100",
        {"cluster.nodes": 1, "model.name": "qwen3-30b-a3b", "model.dtype": "fp8", **FEW}
        | {"parallel.framework": "torchtitan", "parallel.ep": 4, "parallel.tp": 2},
    ),
    "megatron": (
        "megatron",
        "ep8_mixtral_8x7b_8x8_h100",
        {"cluster.nodes": 2, "parallel.global_batch_size": 16, **FEW},
    ),
    "megatron, split": (
        "megatron",
        "tp8_pp4_llama3_70b_32x8_h100",
        {"cluster.nodes": 2, "parallel.tp": 2, "parallel.pp": 2, "parallel.cp": 2, "parallel.vpp": None, **FEW}
        | {"parallel.layers_per_virtual_stage": None, "parallel.global_batch_size": 8},
    ),
    "deepspeed": ("deepspeed", "zero3_llama3_8b_2x8_a100", {"cluster.nodes": 1, **FEW}),
}
GIVEN = {
    "model.seq_len": [2048],
    "model.frozen": [["layers.0.*"]],
    "model.adapter": [{"kind": "lora", "r": 8, "target_modules": ["q_proj"]}],
    "model.activation_offloading": ["20 GB/s"],
    "model.packing": [{"mean": 512, "std": 100}],
    "model.options": [{"layers": 16}],
    "run.variation": [{"step_cv": 0.05}],
    "run.jitter": [0.05],
    "run.optimizer": ["sgd", "adamw_8bit"],
    "run.cuda_graph": [["full_iteration"]],
    "run.pins": [[{"kind": "all_reduce", "algorithm": "TREE"}]],
    "run.nccl_version": ["2.20"],
    "parallel.schedule": ["gpipe"],
    "parallel.order": ["llama3"],
    "parallel.routing.kind": ["zipf"],
    "parallel.capacity_factor": [1.25],
    "parallel.microbatches": [2],
}
"""Values of fields whose type does not list them."""


def others(path, field):
    """Other values that a field may have, as far as its type lists them."""
    if path in GIVEN:
        return GIVEN[path]
    kinds = get_args(field.type) if get_origin(field.type) is not Literal else (field.type,)
    for kind in (field.type, *kinds):
        if kind is bool:
            return [not field.default]
        if get_origin(kind) is Literal:
            return [value for value in get_args(kind) if value != field.default]
        if kind is int or int in get_args(kind):
            return [2]
    return []


def changes(to):
    """(field, value) of what a scenario of a framework may say of model, run, strategy and split."""
    strategy = STRATEGIES["zero" if to == "deepspeed" else load(to).kinds[0]].config
    for table, kind in (("model", Model), ("run", Run), ("strategy", strategy), ("parallel", ParallelConfig)):
        for field in fields(kind):
            path = f"{table}.{field.name}"
            if path == "run.steps":
                continue  # of the play: how many are looked at
            yield from ((path, value) for value in others(path, field))


@cache
def base(case):
    to, name, edits = BASES[case]
    made = scenario.load(name, edits)
    return made, exchange.written(made, to)


def told(files):
    return files.texts, files.wordless, files.machine


def figures(made):
    ran = folded(made)
    return ran.step_time_s, ran.memory.share


@pytest.mark.parametrize("case", BASES)
def test_what_is_neither_written_nor_named_changes_nothing(case):
    made, files = base(case)
    to = BASES[case][0]
    silent = []
    for path, value in changes(to):
        try:
            changed = made.changed({path: value})
            again = exchange.written(changed, to)
        except ClusterSimError:
            continue  # not of this framework or model, and told so
        if told(again) == told(files) and changed.inputs() != made.inputs():
            silent.append((path, value, changed))
    as_it_is = figures(made)
    for path, value, changed in silent:
        assert figures(changed) == as_it_is, (path, value)


@pytest.mark.parametrize("framework", ["deepspeed", "accelerate"])
@pytest.mark.parametrize("attention", [None, "flash", "eager"])
def test_of_eager_kernels_only_those_that_would_be_others_have_no_word(framework, attention):
    """Attention that PyTorch fuses is what both frameworks' words say of flash attention, beside whatever kernels."""
    few = {"cluster.nodes": 1, **FEW, "model.implementation": "eager"}
    made = scenario.load("zero3_llama3_8b_2x8_a100", few | ({"model.attention": attention} if attention else {}))
    written = exchange.written(made, framework)
    script = next(text for name, text in written.texts.items() if name.endswith(".sh"))
    assert not any("model.attention" in line for line in written.wordless)
    assert ("--use-flash-attn-v2" in script) == (framework == "deepspeed" and attention == "flash")
    assert ("--attn_implementation eager" in script) == (framework == "accelerate" and attention != "flash")
    other = any("model.implementation" in line for line in written.wordless)
    assert other == (framework == "deepspeed" or attention == "flash")
