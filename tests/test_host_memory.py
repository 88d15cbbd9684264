"""Host memory: what offloads keep in it, whether a node has it, and that every command says the same of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustersim import scenario
from clustersim.cluster import files as fabrics
from clustersim.core.errors import ScenarioError, TopologyError
from clustersim.core.host_memory import HostMemory, either, worse
from clustersim.core.paths import shipped
from clustersim.scenario.run.held import held
from clustersim.studies.plan.limits import too_much
from clustersim.studies.what_if.memory_table import table

NAME = "zero3_llama3_8b_2x8_a100"
AWAY = {"strategy.zero_optimization.offload_optimizer.device": "cpu"}
NEEDED = 18 * 8_030_261_248 / 2
"""Bytes on each of two nodes."""


def machine(folder: Path, memory: str, name: str = "own") -> str:
    """A file of a machine whose nodes have so much host memory."""
    path = folder / f"{name}.toml"
    path.write_text(f'name = "{name}"\nextends = "hgx-a100"\n[node]\nhost_memory = "{memory}"\n', encoding="utf-8")
    return str(path)


def parts(folder: Path, memory: str, **more: Any):
    """The scenario with its optimizer on the host of such nodes."""
    return held(scenario.load(NAME, {**AWAY, "cluster.topology": machine(folder, memory), **more}))


@pytest.mark.parametrize(
    ("memory", "state"), [("2 TiB", "fits"), ("80 GiB", "may run out"), ("50 GiB", "does not fit")]
)
def test_the_verdict_is_of_the_memory_that_has_less_room(tmp_path, memory, state):
    own = parts(tmp_path, memory)
    assert own.host.kept_bytes == pytest.approx(NEEDED, rel=1e-6)
    assert own.verdict.of_device == "fits"
    assert own.host.state == own.verdict.state == state
    assert own.verdict.ok == (state == "fits")
    assert f"host memory {state}" in str(own.verdict)


def test_a_machine_whose_file_does_not_say_is_unknown_and_that_is_said():
    verdict = held(scenario.load(NAME, AWAY)).verdict
    assert verdict.host.state == "unknown"
    assert verdict.state == "fits"
    assert verdict.uncertain
    assert "host memory unknown: needs 67.31 GiB a node" in str(verdict)
    assert "host memory" not in str(held(scenario.load(NAME)).verdict)


def test_what_an_optimizer_on_the_host_takes_is_told_with_what_is_assumed_of_the_host():
    """Steps of 7B on 8 A800 took 2.5 times as long as played, as if all cores worked: no threads were told."""
    (told,) = (note for note in scenario.load(NAME, AWAY).run().notes if "OMP_NUM_THREADS" in note)
    assert told.startswith("the optimizer on the CPU takes ")
    own = {**AWAY, "strategy.dram_bandwidth": "100 GB/s"}
    for changes in (own, {}):
        assert not [note for note in scenario.load(NAME, changes).run().notes if "OMP_NUM_THREADS" in note]


def test_nothing_larger_fits_where_the_host_is_too_small(clustersim, tmp_path):
    changes = [f"{key}={value}" for key, value in {**AWAY, "cluster.topology": machine(tmp_path, "50 GiB")}.items()]
    options = [word for change in changes for word in ("--set", change)]
    (row,) = json.loads(clustersim("memory", NAME, "--json", *options).stdout)["rows"]
    assert (row["verdict"], row["host_verdict"], row["fits"]) == ("does not fit", "does not fit", False)
    assert row["largest_micro_batch"] == 0
    assert row["host"] == {"kept_bytes": pytest.approx(NEEDED, rel=1e-6), "room_bytes": 50 * 2**30}
    text = clustersim("memory", NAME, *options).stdout
    assert "host memory does not fit: needs 67.31 GiB a node, about 101 GiB with buffers, of 50 GiB" in text
    run = json.loads(clustersim("run", NAME, "--json", *options, "--set", "run.steps=1").stdout)
    assert run["fits"] is False
    assert run["memory"]["host"]["verdict"] == "does not fit"
    assert "does not fit, it needs 17.31 GiB more memory than a node's host has; if it fitted, " in run["verdict"]


def test_a_plan_refuses_what_a_host_has_no_room_for(tmp_path):
    assert too_much(parts(tmp_path, "50 GiB"), 0.1).startswith("host memory does not fit")
    assert too_much(parts(tmp_path, "80 GiB"), 0.1) == ""


PLAN = """
title = "offload"
[model]
name = "gpt2"
seq_len = 1024
[[machines]]
topology = "{machine}"
nodes = [1]
[batch]
samples = 64
[try]
simulations = 4
micro_batch_size = [1]
activation_checkpointing = ["none"]
[[try.strategies]]
kind = "zero"
param_dtype = "bf16"
zero_optimization = {{ stage = 2, offload_optimizer = {{ device = "cpu" }} }}
"""


@pytest.mark.parametrize(("memory", "fits"), [("2 TiB", True), ("1 GiB", False)])
def test_no_offload_is_the_best_option_of_a_plan_where_the_host_is_too_small(clustersim, tmp_path, memory, fits):
    file = tmp_path / "plan.toml"
    file.write_text(PLAN.format(machine=machine(tmp_path, memory)), encoding="utf-8")
    done = clustersim("plan", str(file), "--out", str(tmp_path / "out"), "--jobs", "1")
    told = done.stdout + done.stderr
    assert ("Take " in told) == fits
    assert ("host memory does not fit" in told) != fits


def test_every_rank_of_a_node_counts_and_no_other_nodes(tmp_path):
    one = parts(tmp_path, "2 TiB", **{"cluster.nodes": 1})
    half = parts(tmp_path, "2 TiB", **{"cluster.gpus_per_node": 4})
    assert one.host.kept_bytes == pytest.approx(2 * NEEDED, rel=1e-6)
    assert half.host.kept_bytes == pytest.approx(NEEDED, rel=1e-6)


def test_fsdp_keeps_parameters_gradients_and_states_in_its_own_type(tmp_path):
    own = held(scenario.load("fsdp_llama3_8b_64x8_h100", {"strategy.cpu_offload": True, "cluster.nodes": 1}))
    each = {"fp32": 16, "bf16": 8}[own.scenario.config.orig_dtype]
    assert own.host.kept_bytes == pytest.approx(each * own.model.parameters, rel=1e-3)


def test_activations_that_wait_on_the_host_are_in_its_memory():
    changes = {"model.activation_offloading": "20 GB/s", "model.activation_checkpointing": "none"}
    own = scenario.load("lora_qwen_7b_1x1_a100", changes).prepare()
    assert own.host.kept_bytes == pytest.approx(own.cost.offloaded.sum())


def test_a_tensor_parallel_rank_offloads_its_part_alone():
    changes = {"strategy": {"kind": "zero", "param_dtype": "bf16"}, "cluster.nodes": 1, "model.options.layers": 4}
    own = scenario.load("fsdp_tp8_llama3_70b_32x8_h100").changed(changes)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    split = held(own.changed({"strategy.zero_optimization": zero}))
    assert split.split is not None
    assert split.host.kept_bytes == pytest.approx(18 * split.model.parameters, rel=2e-3)


@pytest.mark.parametrize(("stage", "passes", "each"), [(1, 1, 18), (2, 1, 18), (2, 4, 20), (3, 1, 18), (3, 4, 18)])
def test_hosts_have_16_bit_copies_of_parameters_in_stages_1_and_2_and_of_gradients_that_are_added_to(
    stage, passes, each
):
    """What deepspeed/runtime/zero/stage_1_and_2.py allocates for good: master, gradient and two moments in fp32, and
    ``param_buffer_of_bit16_for_cpu_offload_groups``; with accumulation ``accumulated_grads_in_cpu``. Stage 3 has
    ``grad_partitions_flat_buffer`` on its optimizer's device in any case."""
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    strategy = {"kind": "zero", "param_dtype": "bf16", "zero_optimization": zero}
    strategy |= {"gradient_accumulation_steps": passes}
    own = held(scenario.load(NAME, {"cluster.nodes": 1, "strategy": strategy, "model.options": {"layers": 4}}))
    assert own.host.kept_bytes == pytest.approx(each * own.model.parameters, rel=1e-3)
    assert any("twice" in note for note in own.scenario.config.notes) == (stage < 3)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"kind": "fsdp", "cpu_offload": True}, "cpu_offload = true is not played"),
        ({"kind": "zero", "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "stage = 1"),
    ],
)
def test_an_offload_that_a_split_model_would_leave_on_the_gpus_is_refused(table, words):
    with pytest.raises(ScenarioError, match=words):
        held(scenario.load("fsdp_tp8_llama3_70b_32x8_h100", {"strategy": table, "cluster.nodes": 1}))


def test_one_node_that_is_known_to_be_too_small_is_enough_and_one_that_nobody_knows_too(tmp_path):
    small = machine(tmp_path, "50 GiB", "small")
    mixed = tmp_path / "mixed.toml"
    text = 'name = "mixed"\nnodes = [{{ type = "{}", count = 1 }}, {{ type = "hgx-a100", count = 1 }}]\n'
    for memory, state in (("50 GiB", "does not fit"), ("2 TiB", "unknown")):
        small = machine(tmp_path, memory, "small")
        mixed.write_text(text.format(small) + _fabric(), encoding="utf-8")
        own = held(scenario.load(NAME, {**AWAY, "cluster.topology": str(mixed)}))
        assert own.host.state == state


def _fabric() -> str:
    return '[fabric]\nkind = "fat_tree"\nradix = 64\nsource = "test"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1024", "1024 is a bare number where a size is needed"),
        ('"2 TB/s"', "cannot read '2 TB/s' as a size"),
        ('"0 GiB"', "host_memory is 0 B: write what the node has"),
        ('"-1 GiB"', "-1 GiB"),
    ],
)
def test_a_wrong_size_is_one_error_with_its_place(tmp_path, text, words):
    path = tmp_path / "wrong.toml"
    path.write_text(f'name = "wrong"\nextends = "hgx-a100"\n[node]\nhost_memory = {text}\n', encoding="utf-8")
    with pytest.raises(TopologyError) as error:
        fabrics.load(str(path), nodes=1)
    assert words in str(error.value)
    assert "node.host_memory" in str(error.value)


def test_a_machine_that_says_its_host_memory_says_where_from():
    told = {name: fabrics.node(name).type for name in shipped("topologies")}
    known = {name: node for name, node in told.items() if node.host_memory is not None}
    assert {"aws-p5", "azure-ndv5", "dgx-h100"} <= known.keys()
    assert all(node.sources.get("host_memory") for node in known.values())


def test_likelihoods_and_states_of_both_memories_add_up():
    sure, full = HostMemory(1e9, 3e9), HostMemory(3e9, 1e9)
    assert (sure.runs_out, full.runs_out, HostMemory(1e9, 1.5e9).runs_out) == (0.0, 1.0, 0.5)
    assert either(0.5, HostMemory(1e9, 1.5e9)) == 0.75
    assert worse("may run out", full) == "does not fit"
    assert worse("does not fit", sure) == "does not fit"


def test_a_run_says_first_that_its_host_may_run_out_and_where_that_is_said(tmp_path):
    changes = {**AWAY, "cluster.topology": machine(tmp_path, "80 GiB")}
    result = scenario.load(NAME, changes).run()
    host = result.verdict.host
    assert f"if the host's memory lasts (likelihood of running out {host.runs_out:.0%})" in result.in_words
    assert "node.host_memory" in host.in_words
    assert "node.host_memory" in HostMemory(1e12).in_words
    roomy = scenario.load(NAME, {**AWAY, "cluster.topology": machine(tmp_path, "2 TiB")}).run()
    assert "host's memory lasts" not in roomy.in_words


def test_the_largest_micro_batch_keeps_to_the_rule_of_the_verdict(tmp_path):
    own = table(parts(tmp_path, "80 GiB").scenario, every=False)[0]
    assert (own.host.state, own.largest_micro_batch) == ("may run out", 0)
    assert own.largest_that_may_fit > 0
    assert held(parts(tmp_path, "80 GiB").scenario).verdict.possible
    roomy = table(parts(tmp_path, "2 TiB").scenario, every=False)[0]
    assert roomy.largest_that_may_fit >= roomy.largest_micro_batch > 0
