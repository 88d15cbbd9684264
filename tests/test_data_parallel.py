"""torch.nn.DataParallel and distributed SGD step by step: closed forms for every part, and a measured pair."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from player import play, toy_cost, toy_model

from clustersim import model as models
from clustersim.cluster import files as fabrics
from clustersim.core.device import device
from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective
from clustersim.engine import simulate
from clustersim.model.seconds import Execution, step_cost
from clustersim.training.strategies import steps_of_sgd
from clustersim.training.strategies.data_parallel import CHUNK, DataParallelConfig, build, holding
from clustersim.training.strategies.steps_of_sgd import StepsOfSGDConfig, report
from tests.tables import table_rows

MIB = 2**20
TABLE = Path(__file__).parents[1].parent / "shared" / "measurements" / "training_steps.csv"


def ranks(n):
    return Mesh(np.arange(n), n)


def named(program, start):
    return [op for op in program.roles[0].ops if op.name.startswith(start)]


def programmed(model, n=4, steps=1, config=None, **costs):
    return build(model, toy_cost(model, **costs), ranks(n), config or DataParallelConfig(), steps, 0)


# --- DataParallel ------------------------------------------------------------------------------------------------


def test_parameters_go_out_in_chunks_of_10_mib_in_every_forward_and_gradients_come_back():
    model = toy_model([[MIB] * 2, [MIB] * 4, [10]])  # 8 and 16 MiB, and a bit
    program = programmed(model, steps=2)
    out = named(program, "broadcast parameters")
    back = named(program, "reduce gradients")
    assert len(out) == len(back) == 2 * 3
    assert sum(op.nbytes for op in out) == sum(op.nbytes for op in back) == 2 * 4 * model.parameters
    assert all(op.nbytes < CHUNK + 4 * MIB for op in out)
    assert {op.kind for op in out} == {"broadcast"}
    assert all(op.root == 0 for op in (*out, *back))


def test_nothing_overlaps_compute():
    model = toy_model([[MIB]] * 3, buffers=8)
    program = programmed(model, steps=2)
    timeline = play(program, lambda op: 1e-3)
    computing = [
        (s, e)
        for o, s, e in zip(timeline.row_op, timeline.row_start, timeline.row_end, strict=True)
        if timeline.ops[o].phase in {"forward", "backward", "optimizer"} and e > s
    ]
    talking = [
        (s, e)
        for o, s, e in zip(timeline.row_op, timeline.row_start, timeline.row_end, strict=True)
        if timeline.ops[o].kind != "compute"
    ]
    assert all(e <= a + 1e-12 or b <= s + 1e-12 for s, e in talking for a, b in computing)


@pytest.mark.parametrize("n", [2, 8])
def test_the_interpreter_lock_makes_forward_launches_n_times_as_long(n):
    model = toy_model([[8]] * 5)
    launch = np.full(5, 4e-4)
    cost = toy_cost(model, forward=1e-4, backward=1e-4, per_tensor=0.0, optimizer=0.0)
    program = build(model, replace(cost, forward_launch=launch), ranks(n), DataParallelConfig(), 1, 0)
    quick = build(model, cost, ranks(n), DataParallelConfig(), 1, 0)
    late, early = (play(p, lambda op: 0.0).makespan for p in (program, quick))
    # Kernels of 0.1 ms wait for launches of n x 0.4 ms; only the last kernel is left when launching is over.
    assert late == pytest.approx(5 * n * 4e-4 + 1e-4 + 5e-4, rel=1e-6, abs=1e-7)
    assert early == pytest.approx(5 * 1e-4 + 5e-4, rel=1e-6, abs=1e-7)


def test_launches_hide_where_kernels_are_long():
    model = toy_model([[8]] * 5)
    cost = replace(toy_cost(model, forward=1e-2, per_tensor=0.0, optimizer=0.0), forward_launch=np.full(5, 1e-4))
    program = build(model, cost, ranks(4), DataParallelConfig(), 1, 0)
    assert play(program, lambda op: 0.0).makespan == pytest.approx(4e-4 + 5e-2 + 5 * 2e-3, rel=1e-3)


def test_only_device_0_updates_and_only_after_the_last_reduce():
    model = toy_model([[MIB]] * 2)
    program = programmed(model, n=3)
    (update,) = named(program, "optimizer")
    assert update.duration.tolist() == [5e-4, 0.0, 0.0]
    timeline = play(program, lambda op: 1e-3)
    starts = {timeline.ops[o].name: s for o, s in zip(timeline.row_op, timeline.row_start, strict=True)}
    ends = {timeline.ops[o].name: e for o, e in zip(timeline.row_op, timeline.row_end, strict=True)}
    assert starts["optimizer"] >= ends["reduce gradients chunk 0"]


def test_replicas_are_made_again_in_every_micro_step():
    model = toy_model([[MIB]])
    three = programmed(model, config=DataParallelConfig(gradient_accumulation_steps=3))
    assert len(named(three, "broadcast parameters")) == 3
    assert len(named(three, "optimizer")) == 1


def test_one_device_is_the_module_itself():
    model = toy_model([[MIB]] * 2)
    program = programmed(model, n=1)
    assert not any(isinstance(op, Collective) for op in program.roles[0].ops)


def test_a_build_without_nccl_copies_from_and_to_device_0():
    model = toy_model([[MIB]])
    program = programmed(model, config=DataParallelConfig(nccl=False))
    assert {op.algorithm for op in (*named(program, "broadcast"), *named(program, "reduce"))} == {"direct"}


def test_logits_of_all_devices_meet_on_device_0():
    model = models.model("gpt2", seq_len=128)
    program = programmed(model, n=2, config=DataParallelConfig(micro_batch_size=3))
    (gathered,) = named(program, "gather outputs")
    assert gathered.nbytes == 2 * 3 * 128 * 50257 * 4
    held = holding(model, ranks(2), DataParallelConfig(micro_batch_size=3))
    assert held.buffers.max() == gathered.nbytes


def test_several_nodes_are_an_error():
    model = toy_model([[8]])
    with pytest.raises(ProgramError, match="one process on one node, but the mesh has 2 nodes"):
        build(model, toy_cost(model), Mesh(np.arange(16), 8), DataParallelConfig(), 1, 0)


def test_data_parallel_is_slower_than_ddp_and_the_more_so_for_small_batches():
    from clustersim.training.strategies.ddp import DDPConfig
    from clustersim.training.strategies.ddp import build as build_ddp

    model = models.model("resnet50")
    topology = fabrics.load("dgx-1v", nodes=1)
    mesh = fabrics.mesh(topology)
    ratio = []
    for batch in (4, 64):
        cost = step_cost(model, device("V100-SXM2-16GB"), batch, Execution(dtype="fp32", optimizer="sgd"))
        ends = [
            simulate(make(model, cost, mesh, config, 3, 0), topology, mesh).makespan
            for make, config in ((build, DataParallelConfig()), (build_ddp, DDPConfig()))
        ]
        ratio.append(ends[0] / ends[1])
    assert ratio[0] > ratio[1] > 1


@pytest.mark.shared
@pytest.mark.skipif(not TABLE.is_file(), reason="needs ../shared/measurements/training_steps.csv")
def test_dp_against_ddp_on_two_gpus_has_the_measured_order_and_ratios():
    from tests.evidence.step_play import costs_of, step_time
    from tests.evidence.step_rows import read

    wanted = {"ptddp-0051": "dp", "ptddp-0052": "ddp", "ptddp-0053": "ddp without NVLink"}
    measured = {}
    predicted = {}
    for row in table_rows(TABLE):
        if row["case_id"] in wanted:
            run = read(row)
            measured[wanted[row["case_id"]]] = run.measured
            predicted[wanted[row["case_id"]]] = step_time(run, costs_of(run))
    ratio = predicted["dp"] / predicted["ddp"] / (measured["dp"] / measured["ddp"])
    assert ratio == pytest.approx(1, abs=0.15)
    assert predicted["ddp"] < predicted["dp"]
    assert predicted["ddp"] < predicted["ddp without NVLink"]


# --- distributed SGD step by step --------------------------------------------------------------------------------


def stepped(exchange="gather", n=4, steps=2, accumulation=1):
    model = toy_model([[MIB]] * 2, seq_len=64)
    config = StepsOfSGDConfig(exchange=exchange, gradient_accumulation_steps=accumulation)
    return model, steps_of_sgd.build(model, toy_cost(model, grad_copy_bandwidth=1e9), ranks(n), config, steps, 0)


def test_the_steps_of_sgd_come_in_order_and_one_at_a_time():
    _, program = stepped()
    timeline = play(program, lambda op: 1e-3)
    order = np.argsort(timeline.row_start, kind="stable")
    names = [timeline.ops[o].name for o in timeline.row_op[order] if timeline.ops[o].step == 1]
    assert list(dict.fromkeys(names)) == [
        "scatter batch",
        "fwd l0",
        "fwd l1",
        "bwd l1",
        "bwd l0",
        "gather gradients",
        "sum gradients",
        "update",
        "broadcast parameters",
    ]
    for earlier, later in itertools.pairwise(order):
        same = timeline.row_start[earlier] == timeline.row_start[later]
        assert same or timeline.row_end[earlier] <= timeline.row_start[later] + 1e-12


def test_what_each_exchange_moves_and_who_adds_up():
    for exchange, nbytes, at_root in (("gather", 4, True), ("reduce", 1, True), ("all_reduce", 1, False)):
        model, program = stepped(exchange)
        (moved, _) = named(program, f"{exchange} gradients")
        assert moved.nbytes == nbytes * 4 * model.parameters
        (update, _) = named(program, "update")
        assert np.ndim(update.duration) == (1 if at_root else 0)
        assert len(named(program, "broadcast parameters")) == (2 if at_root else 0)
        assert len(named(program, "broadcast model")) == 1


def test_the_report_names_each_phases_bound_and_idle_share():
    topology = fabrics.load("hgx-a100", nodes=1)
    mesh = fabrics.mesh(topology)
    model = toy_model([[MIB]] * 2, seq_len=64)
    program = steps_of_sgd.build(model, toy_cost(model), mesh, StepsOfSGDConfig(), 3, 0)
    timeline = simulate(program, topology, mesh)
    phases = {p.phase: p for p in report(program, timeline, topology, mesh, None).phases}
    assert list(phases) == list(dict.fromkeys(steps_of_sgd.PHASES.values()))
    assert phases["forward"].bound == "compute"
    assert phases["exchange gradients"].bound == phases["copy the model"].bound == "communication"
    assert phases["update"].bound == "memory"
    assert phases["forward"].idle == pytest.approx(0)
    assert phases["copy the model"].idle == 1
    assert phases["update"].idle == pytest.approx(7 / 8)
    assert phases["forward"].seconds == pytest.approx(2e-3)


def test_a_pin_without_an_exchange_it_could_pin_is_an_error():
    with pytest.raises(msgspec.ValidationError, match="a gather is plain sends"):
        msgspec.convert({"kind": "sgd_steps", "algorithm": "ring"}, StepsOfSGDConfig)
