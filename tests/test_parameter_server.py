"""Parameter servers: bytes and times against closed forms, asynchrony's bounds, and where servers may sit."""

from __future__ import annotations

import csv
import itertools
import statistics
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from player import toy_cost, toy_model
from toy import star

from clustersim.cluster import files as fabrics
from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.program import Recv, Send, Serve, seconds
from clustersim.core.timeline import step_ends
from clustersim.core.units import format_time
from clustersim.engine import simulate
from clustersim.explain.breakdown import breakdown
from clustersim.explain.metrics import steady_window, summary
from clustersim.explain.stalls import causes
from clustersim.explain.waterfall import waterfall
from clustersim.explain.whatif import whatif
from clustersim.studies.what_if.rerun import rerun_step
from clustersim.training.strategies.parameter_server import ParameterServerConfig, build, holding, place
from clustersim.training.strategies.ps_report import report, staleness
from clustersim.training.strategies.server_layout import shares

MIB = 2**20
Z = 4 * MIB
STEP_TIMES = Path(__file__).parents[1].parent / "shared" / "measurements" / "training_steps.csv"


def free(model, **more):
    """Costs with a server whose memory takes no time."""
    return toy_cost(model, **({"host_bandwidth": 1e18, "grad_copy_bandwidth": 1e18, "optimizer": 0.0} | more))


def on_switch(n, server="gpu", rate=1e9, forward=1e-9, steps=4, model=None, **knobs):
    """n workers and a server of their own (or not) on one switch at line rate: program, timeline, mesh, topology."""
    model = model or toy_model([[Z // 4]])
    topology = star(n + (server == "gpu"), bandwidth=rate, per_node=1)
    config = ParameterServerConfig(server=server, **knobs)
    ranks = place(topology, Mesh(topology.gpus, 1), config)
    cost = free(
        model, forward=forward, backward=forward, **({"jitter": knobs.pop("jitter")} if "jitter" in knobs else {})
    )
    program = build(model, cost, ranks, config, steps, 3)
    return program, simulate(program, topology, ranks, backend="ideal"), ranks, topology, config


def step_time(timeline, ranks):
    model = toy_model([[Z // 4]])
    return summary(timeline, model, samples_per_step=1, workers=ranks.workers)["step_time_s"]


# --- bytes and times ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 16])
def test_a_server_takes_n_z_and_gives_n_z_every_step(n):
    program, timeline, ranks, topology, config = on_switch(n, steps=3)
    found = report(program, timeline, topology, ranks, config).servers[0]
    assert (found.bytes_in, found.bytes_out) == (n * Z, n * Z)
    moved = timeline.links.bytes_per_link()
    server = int(ranks.gpus[-1])
    assert moved[server] == pytest.approx(3 * n * Z, rel=1e-3)  # and requests, 64 bytes each
    assert moved[topology.link_dst == server].sum() == pytest.approx(3 * n * Z, rel=1e-3)


def test_a_server_takes_time_linear_in_the_number_of_workers_where_a_ring_is_flat():
    sizes = np.array([2, 4, 8, 16, 32, 64])
    times = np.array([step_time(*on_switch(n, steps=3)[1:3]) for n in sizes.tolist()])
    # All pull N Z through one link, and push as much when that is over.
    assert times == pytest.approx(2 * sizes * Z / 1e9, rel=1e-2)


def test_servers_that_share_the_parameters_divide_the_time():
    model = toy_model([[Z // 16]] * 4)
    one, four = (step_time(*_sharded(model, servers)) for servers in (1, 4))
    assert one / four == pytest.approx(4, rel=2e-2)


def _sharded(model, servers):
    topology = star(8 + servers, bandwidth=1e9, per_node=1)
    config = ParameterServerConfig(server="gpu", servers=servers)
    ranks = place(topology, Mesh(topology.gpus, 1), config)
    program = build(model, free(model, forward=1e-9, backward=1e-9), ranks, config, 3, 0)
    return simulate(program, topology, ranks, backend="ideal"), ranks


def test_pushes_hide_behind_backward_and_pulls_behind_forward():
    model = toy_model([[MIB // 4]] * 8)
    topology = star(3, bandwidth=1e9, per_node=1)
    config = ParameterServerConfig(server="gpu")
    ranks = place(topology, Mesh(topology.gpus, 1), config)
    program = build(model, free(model, forward=10e-3, backward=10e-3), ranks, config, 3, 0)
    timeline = simulate(program, topology, ranks, backend="ideal")
    layer = 2 * MIB / 1e9  # both workers' bytes of a layer through the server's link
    # 16 spans of compute; only the first layer's pull and the last one's push are exposed.
    assert step_time(timeline, ranks) == pytest.approx(8 * 20e-3 + 2 * layer, rel=1e-3)


def test_a_servers_memory_is_used_in_order_of_arrival_and_bounds_the_step():
    model = toy_model([[Z // 4]])
    topology = star(5, bandwidth=1e12, per_node=1)
    config = ParameterServerConfig(server="gpu")
    ranks = place(topology, Mesh(topology.gpus, 1), config)
    cost = toy_cost(model, 1e-9, 1e-9, grad_copy_bandwidth=1e9, optimizer_traffic=12.0 * Z)
    timeline = simulate(build(model, cost, ranks, config, 4, 0), topology, ranks, backend="ideal")
    assert step_time(timeline, ranks) == pytest.approx((4 * 3 * Z + 12 * Z) / 1e9, rel=1e-3)


def test_round_robin_deals_out_whole_tensors_and_even_cuts_them():
    model = toy_model([[10, 20], [30], [40]])
    assert shares(model, 2, "round_robin").tolist() == [[10, 20], [30, 0], [0, 40]]
    assert shares(model, 2, "even").tolist() == [[15, 15], [15, 15], [20, 20]]
    tied = toy_model([[10], [20]], tied=True)
    assert shares(tied, 1, "even").sum() == tied.parameters


def test_layers_gathered_into_a_message_travel_together_and_the_bytes_are_the_same():
    model = toy_model([[MIB // 4], [MIB // 4], [], [MIB // 2], [7]])
    topology = star(4, bandwidth=1e9, per_node=1)
    told = {}
    for cap in (None, 1.5, 1e6):
        config = ParameterServerConfig(server="gpu", bucket_cap_mb=cap)
        ranks = place(topology, Mesh(topology.gpus, 1), config)
        program = build(model, free(model), ranks, config, 2, 0)
        timeline = simulate(program, topology, ranks, backend="ideal")
        sent = [
            op for op in program.roles[0].ops if isinstance(op, Send) and op.name.startswith("push") and not op.step
        ]
        moved = report(program, timeline, topology, ranks, config).servers[0].bytes_in
        told[cap] = [op.name for op in sent], moved
    assert told[None][0] == [f"push l{i} -> server" for i in (4, 3, 1, 0)]
    assert told[1.5][0] == ["push l3..l4 -> server", "push l0..l2 -> server"]
    assert told[1e6][0] == ["push l0..l4 -> server"]
    assert len({moved for _, moved in told.values()}) == 1


def test_one_message_for_everything_hides_nothing():
    # Closed form: pull all, forward and backward, push all; the workers' bytes share the server's link.
    model = toy_model([[MIB // 4]] * 8)
    topology = star(3, bandwidth=1e9, per_node=1)
    config = ParameterServerConfig(server="gpu", bucket_cap_mb=1000.0)
    ranks = place(topology, Mesh(topology.gpus, 1), config)
    timeline = simulate(
        build(model, free(model, forward=10e-3, backward=10e-3), ranks, config, 3, 0), topology, ranks, backend="ideal"
    )
    both_ways = 2 * 2 * 8 * MIB / 1e9
    assert step_time(timeline, ranks) == pytest.approx(8 * 20e-3 + both_ways, rel=1e-3)


def test_a_worker_that_serves_sends_nothing_to_itself():
    program, timeline, ranks, topology, config = on_switch(4, server="worker", steps=2)
    found = report(program, timeline, topology, ranks, config).servers[0]
    assert (found.bytes_in, found.bytes_out) == (3 * Z, 3 * Z)
    assert timeline.world_size == 4


def test_a_worker_of_several_gpus_pushes_once():
    model = toy_model([[Z // 4]])
    topology = fabrics.load("hgx-a100", nodes=1)
    pushed = {}
    for gpus in (1, 4):
        config = ParameterServerConfig(gpus_per_worker=gpus)
        ranks = place(topology, fabrics.mesh(topology), config)
        program = build(model, free(model), ranks, config, 2, 0)
        timeline = simulate(program, topology, ranks)
        pushed[gpus] = report(program, timeline, topology, ranks, config).servers[0].bytes_in
    assert pushed == {1: 8 * Z, 4: 2 * Z}


def test_workers_update_where_the_server_only_adds_up():
    program, *_ = on_switch(3, server_updates=False)
    worker, server = program.roles
    assert [op.name for op in worker.ops if op.phase == "optimizer"] == ["optimizer"] * 4
    assert not any(op.name.startswith("update") for op in server.ops)


def test_names_say_who_pushes_and_pulls_what_to_whom():
    worker, server = on_switch(3, steps=1)[0].roles
    said = {op.name for op in server.ops}
    assert {"push l0 worker 2 -> server", "pull l0 worker 2 <- server", "accumulate l0 worker 2", "update l0"} <= said
    assert {op.name for op in worker.ops if isinstance(op, Send | Recv)} == {
        "pull request all layers -> server",
        "pull l0 <- server",
        "push l0 -> server",
    }


# --- asynchrony --------------------------------------------------------------------------------------------------


def uneven(staleness_bound, mode="async", jitter=0.2, steps=24, n=5, rate=1e12):
    """Workers whose steps differ, on links that take next to no time."""
    model = toy_model([[MIB // 4]] * 2)
    topology = star(n + 1, bandwidth=rate, per_node=1)
    config = ParameterServerConfig(server="gpu", mode=mode, staleness=staleness_bound)
    ranks = place(topology, Mesh(topology.gpus, 1), config)
    cost = free(model, jitter=jitter)
    program = build(model, cost, ranks, config, steps, 5)
    return program, simulate(program, topology, ranks, backend="ideal"), ranks, topology, config


def test_asynchronous_with_staleness_0_is_synchronous():
    sync = uneven(None, "sync")
    zero = uneven(0)
    assert zero[1].makespan == sync[1].makespan
    assert staleness(zero[0], zero[1]).max() == 0


def test_the_asynchronous_server_itself_waits_for_everybody_at_staleness_0(monkeypatch):
    # The same through AsyncServer, which applies gradients one by one: with free memory the times are those of sync.
    sync = uneven(None, "sync")
    monkeypatch.setattr(ParameterServerConfig, "synchronous", property(lambda self: False))
    program, timeline, *_ = uneven(0)
    assert any(op.name.startswith("apply") for op in program.roles[-1].ops)
    assert timeline.makespan == pytest.approx(sync[1].makespan, rel=1e-6)


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_staleness_is_never_above_its_bound_and_reaches_it_where_workers_differ_enough(bound):
    program, timeline, *_ = uneven(bound)
    seen = staleness(program, timeline)
    unbound = staleness(*uneven(None)[:2])
    assert len(seen) == 5 * 23
    assert seen.max() == min(bound, unbound.max())


def test_more_slack_is_faster_up_to_compute_bound_and_never_beyond():
    times = [uneven(bound)[1].makespan for bound in (0, 1, 2, 4, 8, 16, None)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(times))
    assert times[0] > 1.1 * times[-1]
    program, timeline, *_ = uneven(None)
    compute = sum(seconds(program.roles[0], op) for op in program.roles[0].ops if op.phase in {"forward", "backward"})
    assert timeline.makespan >= compute.max()
    assert timeline.makespan == pytest.approx(compute.max(), rel=1e-3)


def test_no_worker_is_faster_than_its_own_compute():
    program, timeline, ranks, topology, config = uneven(None, jitter=0.3)
    rates = report(program, timeline, topology, ranks, config).samples_per_s_by_worker
    durations = [
        seconds(program.roles[0], op) for op in program.roles[0].ops if op.phase in {"forward", "backward"} and op.step
    ]
    alone = 23 / sum(durations)
    assert np.all(np.array(rates) <= alone * (1 + 1e-6))
    assert np.ptp(rates) > 0.01 * np.mean(rates)


def test_throughput_of_workers_at_their_own_pace_is_the_sum_of_their_own():
    # Nobody waits: worker w takes what its own kernels take, so the sum is known, and the slowest does not set it.
    program, timeline, ranks, topology, config = uneven(None, jitter=0.3)
    model = toy_model([[MIB // 4]] * 2)
    figures = summary(timeline, model, samples_per_step=7.0 * 5, workers=5, together=False)
    steps = figures["steady_steps"]
    own = [
        seconds(program.roles[0], op)
        for op in program.roles[0].ops
        if op.phase in {"forward", "backward"} and op.step in steps
    ]
    alone = len(steps) / sum(own)
    assert figures["samples_per_s"] == pytest.approx(7.0 * alone.sum(), rel=1e-3)
    assert figures["samples_per_s"] > 1.02 * 7.0 * 5 / figures["slowest_step_s"]
    assert figures["samples_per_s"] == pytest.approx(7.0 * 5 / figures["step_time_s"])
    rates = report(program, timeline, topology, ranks, config).samples_per_s_by_worker
    assert len(rates) == 5


def test_throughput_of_an_asynchronous_scenario_is_its_workers_together():
    from clustersim import scenario

    result = scenario.load("ps_async_1x8", {"run.steps": 6, "strategy.staleness": 5, "run.jitter": 0.3}).run()
    slowest = 32 * 8 / result.summary["step_time_s"]
    assert result.summary["samples_per_s"] > 1.02 * slowest
    assert result.summary["samples_per_s"] == pytest.approx(sum(result.of_strategy.samples_per_s_by_worker), rel=0.1)
    together = scenario.load("ps_async_1x8", {"run.steps": 6, "strategy.staleness": 0}).run().summary
    assert together["samples_per_s"] == 32 * 8 / together["step_time_s"]


def test_a_servers_own_work_bounds_asynchronous_workers_too():
    model = toy_model([[MIB // 4]])
    topology = star(9, bandwidth=1e12, per_node=1)
    config = ParameterServerConfig(server="gpu", mode="async")
    ranks = place(topology, Mesh(topology.gpus, 1), config)
    cost = toy_cost(model, grad_copy_bandwidth=1e9, optimizer_traffic=3.0 * MIB)
    program = build(model, cost, ranks, config, 10, 0)
    timeline = simulate(program, topology, ranks, backend="ideal")
    busy = report(program, timeline, topology, ranks, config).servers[0].busy
    assert timeline.makespan >= 10 * 8 * 3 * MIB / 1e9
    assert busy > 0.9


def test_the_whole_run_is_the_same_for_the_same_seed():
    one = uneven(2)
    two = uneven(2)
    assert np.array_equal(one[1].row_start, two[1].row_start)
    assert np.array_equal(one[1].row_end, two[1].row_end)


# --- places, memory, errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "names"),
    [
        ({"server": "cpu"}, ["node0/cpu0"]),
        ({"server": "cpu", "servers": 3}, ["node0/cpu0", "node1/cpu0", "node0/cpu1"]),
        ({"server": "gpu", "servers": 2}, ["node0/gpu7", "node1/gpu7"]),
        (
            {"server": "gpu", "servers": 2, "gpus_per_server": 2},
            ["node0/gpu7", "node1/gpu7", "node0/gpu6", "node1/gpu6"],
        ),
    ],
)
def test_servers_are_spread_over_nodes_first(knobs, names):
    topology = fabrics.load("hgx-a100", nodes=2)
    ranks = place(topology, fabrics.mesh(topology), ParameterServerConfig(**knobs))
    assert [topology.vertex_names[v] for v in ranks.gpus[ranks.workers :].tolist()] == names
    assert len(set(ranks.gpus.tolist())) == ranks.world_size


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"servers": 3},
        {"server": "gpu", "servers": 2},
        {"server": "worker", "servers": 4, "sharding": "even"},
        {"gpus_per_worker": 4},
        {"by_layer": True},
        {"server_updates": False},
        {"mode": "async", "staleness": 1},
        {"mode": "async", "server": "worker", "servers": 2, "gpus_per_worker": 2},
        {"by_layer": True, "mode": "async"},
    ],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_form_plays_on_two_nodes_and_moves_what_it_should(knobs, accumulation):
    topology = fabrics.load("hgx-a100", nodes=2)
    config = ParameterServerConfig(gradient_accumulation_steps=accumulation, **knobs)
    ranks = place(topology, fabrics.mesh(topology), config)
    model = toy_model([[MIB, 3], [], [MIB // 2], [7]], tied=True)
    program = build(model, toy_cost(model, jitter=0.05, overlap_slowdown=0.3), ranks, config, 3, 1)
    program.check()
    timeline = simulate(program, topology, ranks)
    servers = report(program, timeline, topology, ranks, config).servers
    workers = ranks.workers // config.gpus_per_worker
    own = 1 if config.server == "worker" else 0
    kept = shares(model, config.shards, config.sharding).sum(axis=0) * 4.0
    assert [s.bytes_in for s in servers] == pytest.approx((workers - own) * kept)
    assert [s.bytes_out for s in servers] == pytest.approx((workers - own) * kept)
    assert all(0 <= s.link_use_in <= 1 + 1e-9 for s in servers)
    assert all(isinstance(op, Serve) for role in program.roles for op in role.ops if op.stream == "server")


def test_workers_hold_no_optimizer_states_unless_they_update():
    model = toy_model([[100], [300]])
    ranks = Mesh(np.arange(4), 4)
    keeps = {
        kind: holding(model, ranks, ParameterServerConfig(**knobs)).updated
        for kind, knobs in (
            ("server", {}),
            ("worker", {"server_updates": False}),
            ("shard", {"server": "worker", "servers": 4, "sharding": "even"}),
        )
    }
    assert keeps == {"server": 0, "worker": 400, "shard": 100}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"mode": "sync", "staleness": 2}, "staleness = 2 needs mode = 'async'"),
        ({"mode": "async", "server_updates": False}, "needs server_updates = true"),
        ({"gpus_per_server": 2}, "needs server = 'gpu'"),
        ({"server": "tpu"}, "tpu"),
        ({"mode": "async", "staleness": -1}, "staleness"),
    ],
)
def test_knobs_that_contradict_each_other_are_errors(table, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"kind": "parameter_server"} | table, ParameterServerConfig)


def test_ranks_that_do_not_divide_or_are_not_there_are_errors():
    topology = star(4)
    model = toy_model([[4]])
    with pytest.raises(ProgramError, match="node without a CPU"):
        place(topology, Mesh(topology.gpus, 4), ParameterServerConfig())
    with pytest.raises(ProgramError, match="leave nobody to work"):
        place(topology, Mesh(topology.gpus, 4), ParameterServerConfig(server="gpu", servers=4))
    odd = ParameterServerConfig(server="worker", gpus_per_worker=3)
    with pytest.raises(ProgramError, match="do not divide into workers of 3"):
        build(model, toy_cost(model), Mesh(topology.gpus, 4), odd, 1, 0)
    many = ParameterServerConfig(server="worker", servers=5)
    with pytest.raises(ProgramError, match="5 servers among 4 workers"):
        build(model, toy_cost(model), Mesh(topology.gpus, 4), many, 1, 0)


def test_a_model_cut_into_fewer_pieces_costs_the_same_and_takes_the_same_step():
    from clustersim import model as models
    from clustersim.core.device import device
    from clustersim.model.seconds import Execution, step_cost
    from tests.evidence.step_play import coarser

    model = models.model("resnet50")
    topology = fabrics.load("dgx-1p", nodes=1)
    cost = step_cost(model, device("P100"), 32, Execution(dtype="fp32", optimizer="sgd"))
    ranks = place(topology, fabrics.mesh(topology, nproc_per_node=2), ParameterServerConfig())
    times = []
    for name, priced in ((model, cost), coarser(model, cost)):
        assert name.parameters == model.parameters
        assert priced.forward.sum() + priced.backward.sum() == pytest.approx((cost.forward + cost.backward).sum())
        program = build(name, priced, ranks, ParameterServerConfig(), 3, 0)
        times.append(simulate(program, topology, ranks).makespan)
    assert times[1] == pytest.approx(times[0], rel=0.01)


# --- measured ----------------------------------------------------------------------------------------------------


@pytest.mark.shared
@pytest.mark.skipif(not STEP_TIMES.is_file(), reason="needs ../shared/measurements/training_steps.csv")
def test_resnet50_with_parameter_servers_on_k80_and_p100_is_within_20_percent():
    from tests.evidence.step_play import costs_of, step_time
    from tests.evidence.step_rows import read

    errors = []
    with STEP_TIMES.open() as file:
        for row in csv.DictReader(file):
            servers = row["case_id"].startswith("tfps") and row["strategy"].startswith("ps (parameter_server")
            if servers and row["model"] == "ResNet-50" and row["gpus"] == "2":
                run = read(row)
                errors.append(abs(step_time(run, costs_of(run)) / run.measured - 1))
    assert len(errors) == 5
    assert statistics.median(errors) <= 0.20


@cache
def one_slow_worker():
    from clustersim import scenario

    slow = [{"ranks": [3], "speed": 0.25}]
    changes = {"cluster.nodes": 1, "run.steps": 12, "run.jitter": 0.0, "cluster.slow": slow}
    return scenario.load("ps_async_32x8_v100", changes).run()


def test_a_run_at_own_paces_says_whose_step_it_tells():
    run = one_slow_worker()
    step, slowest = run.summary["step_time_s"], run.summary["slowest_step_s"]
    assert slowest > 3 * step
    assert step == pytest.approx(64 * 8 / run.summary["samples_per_s"])
    told = f"{format_time(step)} a step of workers at paces of their own, {format_time(slowest)} of the slowest"
    assert told in run.in_words
    assert any(f"the slowest takes {format_time(slowest)}" in note for note in run.notes)


def test_workers_that_are_done_are_in_no_figure():
    # Their steps are over while the slow one still has some: that is the end of a simulation, and no wait.
    run = one_slow_worker()
    window = steady_window(run.timeline)
    ended = step_ends(run.timeline)[-1, :8]
    assert window.end == ended.min() < 0.5 * ended.max()
    assert "everybody waits" not in run.in_words
    assert run.summary["waiting_for_peer_s"] < 0.1 * run.summary["step_time_s"]
    charged = causes(run.timeline)
    lost = sum(charged.share(charge) for charge in charged.charges if charge.cause in {"slow rank", "jitter"})
    assert lost < 0.05
    shares = breakdown(run.timeline)
    assert shares.over(np.arange(8))[shares.states.index("bubble")] == 0.0


def test_the_waterfall_of_workers_at_own_paces_ends_at_the_runs_mfu():
    # It ended at 12.8 %, where the run said 42.4 %: three quarters of its window were of workers that were done.
    run = one_slow_worker()
    (fall,) = waterfall(run.timeline, run.facts())
    assert fall.mfu == pytest.approx(run.summary["mfu"], rel=1e-9)
    assert fall.step == pytest.approx(run.summary["step_time_s"], rel=1e-9)


def test_a_bounded_staleness_is_no_pace_of_ones_own():
    from clustersim import scenario

    slow = [{"ranks": [3], "speed": 0.25}]
    changes = {"cluster.nodes": 1, "run.steps": 12, "run.jitter": 0.0, "cluster.slow": slow}
    run = scenario.load("ps_async_32x8_v100", changes | {"strategy.staleness": 1}).run()
    assert not run.timeline.own_paces
    assert run.summary["slowest_step_s"] is None
    charged = causes(run.timeline)
    assert charged.charges[0].cause == "slow rank"
    assert charged.share(charged.charges[0]) > 0.5


def test_times_of_workers_at_own_paces_are_of_their_own_steps():
    # A worker at a quarter of the speed computes four times as long in each of its steps; all of a step's samples take
    # the mean of what GPUs do in the same time.
    run = one_slow_worker()
    per_rank = run.summary["per_rank"]
    compute = per_rank["compute_s"]
    assert compute[3] == pytest.approx(4 * compute[0], rel=0.05)
    assert compute.min() < run.summary["compute_s"] < compute.mean()
    parts = (run.summary[name] for name in ("compute_s", "exposed_communication_s", "idle_s"))
    assert sum(parts) == pytest.approx(run.summary["step_time_s"], rel=0.01)


def test_bounds_of_workers_at_own_paces_are_of_all_of_them():
    # They were of the slowest: at most 2.4 % for other buckets, where a run with them saved 10.5 %.
    run = one_slow_worker()
    bounds = whatif(run.timeline)
    saving = dict(zip(bounds["knob"].tolist(), bounds["saving"].tolist(), strict=True))
    now = steady_window(run.timeline).step_time
    for knob in ("bucket size", "PCIe", "compute speed"):
        again = rerun_step(run.prepared, knob, 2.0)
        assert 0.02 < 1 - again / now <= saving[knob] + 1e-3
