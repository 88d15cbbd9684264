"""A folded run gives the step time of the whole one, and a run is never folded unasked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clustersim import scenario
from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective, Compute, Program, Recv, Role, Send
from clustersim.studies.what_if.folded import folded
from clustersim.studies.what_if.rerun import step_time
from clustersim.studies.what_if.sketch import Sketch
from clustersim.training.builder.representative import representative


def split(nodes: int = 4, topology: str = "hgx-h100", ga: int = 1, strategy: Any = None, **parallel: Any) -> Any:
    """A small GPT on some nodes of eight GPUs."""
    sizes = {"layers": 8, "d_model": 1024, "heads": 16, "kv_heads": 16, "d_ff": 4096, "n_positions": 512}
    return scenario.from_table(
        {
            "cluster": {"topology": topology, "nodes": nodes, "gpus_per_node": 8},
            "model": {"name": "gpt2", "seq_len": 512, "dtype": "bf16", "options": sizes},
            "parallel": parallel,
            "strategy": strategy or {"kind": "ddp", "micro_batch_size": 2, "param_dtype": "bf16"},
            "run": {"steps": 2, "jitter": 0.0, "optimizer": "adam"},
        }
    )


OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
IN_BUCKETS = {"topology": "hgx-h100-800g", "framework": "oneflow", "ddp_num_buckets": 4, **OVERLAPPED}
FSDP = {"kind": "fsdp", "micro_batch_size": 2}
CASES = {
    "tp": {"tp": 8, "microbatches": 7},
    "tp in part of a node": {"tp": 2, "microbatches": 5},
    "tp over two nodes": {"tp": 16, "microbatches": 4},
    "sp with the gradient's sum beside": {"tp": 4, "sequence_parallel": True, "microbatches": 4},
    "cp": {"tp": 2, "cp": 8, "microbatches": 4},
    "distributed optimizer": {"tp": 4, "pp": 2, "microbatches": 9, **OVERLAPPED},
    "parameters that come in buckets": {**IN_BUCKETS, "tp": 2, "microbatches": 6},
    "parameters that come in buckets to a pipeline": {**IN_BUCKETS, "tp": 2, "pp": 2, "microbatches": 5},
    "1f1b": {"tp": 2, "pp": 4, "microbatches": 13},
    "1f1b, stages on one node": {"nodes": 1, "tp": 2, "pp": 4, "microbatches": 13},
    "interleaved": {"tp": 8, "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "microbatches": 8, **OVERLAPPED},
    "interleaved beside cp": {"tp": 4, "cp": 4, "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "microbatches": 8},
    "zb_h1": {"pp": 4, "schedule": "zb_h1", "microbatches": 9},
    "fsdp": {"tp": 4, "strategy": FSDP, "framework": "torchtitan"},
    "fsdp in a pipeline": {"tp": 4, "pp": 2, "microbatches": 4, "strategy": FSDP, "framework": "torchtitan"},
    "zero": {"tp": 4, "microbatches": 2, "strategy": {"kind": "zero", "zero_optimization": {"stage": 2}}},
    "two GPUs to a NIC": {"topology": "hgx-a100-800g", "tp": 8, "pp": 2, "microbatches": 9},
    "NVLink without a switch": {"topology": "dgx-1v", "tp": 4, "pp": 2, "microbatches": 6},
    "the head's weight gradients at the end": {
        "tp": 4,
        "pp": 2,
        "microbatches": 6,
        "defer_embedding_wgrad_compute": True,
        "wgrad_deferral_limit": 2,
    },
    "one NIC for two replicas": {
        "topology": "dgx-1v-1x100g",
        "tp": 4,
        "pp": 4,
        "microbatches": 12,
        "framework": "oneflow",
    },
    "two instances of the optimizer": {"tp": 4, "dp_replicate": 2, "microbatches": 3, **OVERLAPPED},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_folded_step_takes_as_long_as_a_whole_one(case: dict[str, Any]) -> None:
    one = split(**case)
    assert folded(one).step_time_s == pytest.approx(step_time(one.run().timeline), rel=1e-9)


@pytest.mark.parametrize("case", [name for name in CASES if "come in buckets" in name])
def test_layers_begin_while_parameters_of_later_ones_are_on_their_way(case: str) -> None:
    late = split(**{**CASES[case], "overlap_param_gather": False})
    assert folded(split(**CASES[case])).step_time_s < 0.995 * folded(late).step_time_s


ROUGHLY = {name: case for name, case in CASES.items() if not name.startswith("zero")}


@pytest.mark.parametrize("case", ROUGHLY.values(), ids=ROUGHLY.keys())
def test_a_roughly_folded_step_is_near_the_whole_one(case: dict[str, Any]) -> None:
    one = split(**case)
    found = folded(one, roughly=True)
    assert not found.exact
    assert found.step_time_s == pytest.approx(step_time(one.run().timeline), rel=0.03)


SKETCHED = {name: case for name, case in ROUGHLY.items() if not name.startswith("fsdp")}


@pytest.mark.parametrize("case", SKETCHED.values(), ids=SKETCHED.keys())
def test_a_sketched_step_is_near_the_whole_one_where_parameters_are_not_shared_out(case: dict[str, Any]) -> None:
    one = split(**case)
    assert folded(one, sketched=True).step_time_s == pytest.approx(step_time(one.run().timeline), rel=0.03)


def test_a_sketch_of_a_pipeline_without_messages_to_wait_for_is_its_closed_form() -> None:
    """GPipe's (m + p - 1) rounds: of a program in which a pass takes a second and a message none."""
    stages = 3
    count = 5
    mesh = Mesh(np.arange(stages), 1)
    ranks = [np.array([rank]) for rank in range(stages)]

    def role(rank: int) -> Role:
        ops: list[Any] = []
        for m in range(count):
            after: tuple[int, ...] = ()
            if rank:
                ops.append(Recv("recv", 1.0, ranks[rank - 1], "recv", tag=f"{m}"))
                after = (len(ops) - 1,)
            ops.append(Compute("F", 1.0, after=after))
            if rank < stages - 1:
                ops.append(Send("send", 1.0, ranks[rank + 1], "send", (len(ops) - 1,), f"{m}"))
        return Role(f"stage {rank}", ranks[rank], tuple(ops))

    sketch = Sketch(Program(stages, tuple(map(role, range(stages)))), mesh)
    _, keys = sketch.alone({})
    assert sketch.seconds(dict.fromkeys(keys, 0.0)) == count + stages - 1
    assert sketch.seconds(dict.fromkeys(keys, 2.0)) == 1 + 2 + 1 + 2 * count + 1  # one message after the other


def test_experts_traffic_beside_another_micro_batch_is_folded_from_the_second_round_on() -> None:
    sizes = {"layers": 4, "experts_implementation": "grouped_mm"}
    one = scenario.from_table(
        {
            "cluster": {"topology": "hgx-h100", "nodes": 2, "gpus_per_node": 8},
            "model": {"name": "deepseek-v2-lite", "seq_len": 256, "dtype": "bf16", "options": sizes},
            "parallel": {"pp": 2, "vpp": 2, "ep": 8, "dispatcher": "alltoall", "ep_overlap": True, "microbatches": 8},
            "strategy": {"kind": "ddp", "micro_batch_size": 1, "param_dtype": "bf16"},
            "run": {"steps": 2, "jitter": 0.0, "optimizer": "adam"},
        }
    )
    whole = step_time(one.run().timeline)
    assert folded(one).step_time_s == pytest.approx(whole, rel=1e-9)
    assert folded(one, roughly=True).step_time_s == pytest.approx(whole, rel=0.03)


def test_what_repeats_is_played_once() -> None:
    eager = split(tp=8, pp=2, microbatches=9)
    found = folded(eager.changed({"run.cuda_graph": ["full_iteration"]}))
    assert found.ranks == (2, 32)  # of each stage one replica's GPU, as each has a NIC of its own
    assert found.micro_batches == ((2, 4, 6), 9)
    assert found.passes
    # A host that calls what GPUs run is ahead or behind across passes.
    assert not folded(eager).passes
    assert folded(eager, roughly=True).passes


def test_a_run_that_is_not_folded_plays_everybody() -> None:
    one = split(tp=8, pp=2, microbatches=9)
    folded(one)
    program = one.program()
    assert program.world_size == 32
    assert {label.microbatch for op in program.roles[0].ops if (label := op.label)} >= set(range(9))


@pytest.mark.parametrize(
    "changes", [{"run.jitter": 0.05}, {"cluster.slow": [{"ranks": [3], "speed": 0.5}]}, {"parallel.tp": 1}]
)
def test_ranks_that_differ_are_played_whole(changes: dict[str, Any]) -> None:
    one = split(tp=2, microbatches=3).changed(changes)
    assert folded(one).step_time_s == step_time(one.run().timeline)


def test_ranks_that_do_not_stand_for_the_others_are_refused() -> None:
    mesh = Mesh(np.arange(4), 4)
    everyone = np.arange(4)
    groups = np.array([[0, 1], [2, 3]])

    def program(op: Any) -> Program:
        return Program(4, (Role("worker", everyone, (Compute("k", 1.0), op)),))

    with pytest.raises(ProgramError, match="different numbers"):
        representative(program(Collective("sum", "all_reduce", 8.0, groups)), mesh, np.array([0, 1, 2]))
    with pytest.raises(ProgramError, match="sends to one that does not"):
        representative(program(Send("to", 8.0, np.array([1, 2, 3, 0]))), mesh, np.array([0, 1]))
    found = representative(program(Collective("sum", "all_reduce", 8.0, groups)), mesh, np.array([0, 2]))
    assert [gpus.tolist() for gpus in found.whole.values()] == [[0, 1], [2, 3]]
