"""From peak to MFU: every second in one class, by closed forms of small programs, and on whole runs."""

import json
from functools import cache

import numpy as np
import pytest
import toy
from click.testing import CliRunner

import clustersim
from clustersim import engine
from clustersim.app import plots
from clustersim.app.cli import cli
from clustersim.core.errors import ProgramError
from clustersim.core.facts import RunFacts
from clustersim.core.mix import Mix
from clustersim.core.program import Compute
from clustersim.explain.breakdown import breakdown, steady_pieces
from clustersim.explain.explain import explain
from clustersim.explain.pieces import workers
from clustersim.explain.waterfall import WORDS, seconds_of_ops, table, waterfall
from clustersim.files.traces.saved import load_run, save_run

SCENARIOS = {
    "ddp": ("ddp_resnet50_1x8_v100", {}),
    "slow": ("why_slow_gpu", {}),
    "server": ("why_parameter_server", {}),
    "async": ("ps_async_1x8", {}),
    "launch": ("why_launch_bound", {}),
    "single": ("single_gpt2_1x1_a100", {"model.activation_checkpointing": "full"}),
    "torch dp": ("dp_torch_1x8", {}),
    "pipeline": ("1f1b_gpt2_xl_1x8_a100", {}),
    "fsdp": ("fsdp_llama3_8b_64x8_h100", {"cluster.nodes": 2}),
}


def run(program):
    topology = toy.star(program.world_size)
    return engine.simulate(program, topology, toy.mesh(topology), planner=toy.up_links)


@cache
def ran(name):
    scenario, changes = SCENARIOS[name]
    return clustersim.load(scenario, changes).run()


def falls(name):
    result = ran(name)
    facts = RunFacts.of(result.to_dict())
    return waterfall(result.timeline, facts)


def test_a_kernels_time_goes_where_its_mix_says():
    mix = Mix(peak=2.0, products=1.0, memory=3.0, launch=0.5, again=1.5)
    ops = [Compute("fwd", 8.0, phase="forward", mix=mix), Compute("adam", 2.0, phase="optimizer", bound="memory")]
    (row,) = waterfall(run(toy.program(ops, ranks=1)))
    assert row.useful == 2.0
    assert row.lost == {"optimizer": 2.0, "again": 1.5, "launch": 0.5, "memory": 3.0, "products": 1.0}
    assert row.mfu == pytest.approx(0.2)


def test_what_a_slow_gpu_takes_longer_is_uneven_and_what_others_wait_for_it_is_waiting():
    ops = [
        Compute("fwd", np.array([1.0, 1.5]), mix=Mix(peak=0.5, memory=0.5)),
        toy.all_reduce("r", 0.0, [0, 1], after=(0,)),
    ]
    (row,) = waterfall(run(toy.program(ops)))
    # Means over two ranks: half a second more on one of them, and half a second of waiting on the other.
    assert row.lost["uneven"] == pytest.approx(0.25)
    assert row.lost["waiting"] == pytest.approx(0.25)
    assert (row.useful, row.lost["memory"]) == (pytest.approx(0.5), pytest.approx(0.5))


def test_half_of_causal_attention_is_counted_and_not_executed():
    ops = [Compute("fwd", 4.0, flops=1e12, mix=Mix(peak=1.0, products=3.0))]
    (row,) = waterfall(run(toy.program(ops, ranks=1)), RunFacts(peak_flops=1e12, mfu=0.3, hfu=0.25))
    assert row.lost["masked"] == pytest.approx(-0.2)
    assert row.mfu == pytest.approx(0.3)


@pytest.mark.parametrize("name", SCENARIOS)
def test_losses_and_the_useful_part_add_up_to_the_step(name):
    for row in falls(name):
        assert sum(row.lost.values()) + row.useful == pytest.approx(row.step)
        assert set(row.lost) <= set(WORDS)
    assert falls(name)[0].step == pytest.approx(ran(name).summary["step_time_s"])


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "async"])
def test_what_is_left_of_the_peak_is_the_summarys_mfu(name):
    assert falls(name)[0].mfu == pytest.approx(ran(name).summary["mfu"], rel=1e-6)


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_does_not_compute_is_what_the_breakdown_says(name):
    table = breakdown(ran(name).timeline)
    seconds = table.seconds[workers(ran(name).timeline)].mean(axis=0)
    states = dict(zip(table.states, seconds.tolist(), strict=True))
    lost = falls(name)[0].lost
    for key, state in (("exposed", "exposed transfer"), ("waiting", "waiting for a peer"), ("bubble", "bubble")):
        assert lost.get(key, 0.0) == pytest.approx(states[state], abs=1e-12)


def test_the_mean_over_stages_is_the_mean_over_all_gpus():
    whole, *stages = falls("pipeline")
    assert [row.stage for row in stages] == list(range(8))
    for key in whole.lost:
        assert np.mean([row.lost.get(key, 0.0) for row in stages]) == pytest.approx(whole.lost[key], abs=1e-9)


def test_recomputation_is_a_loss_of_its_own_and_a_state():
    result = ran("single")
    again = falls("single")[0].lost["again"]
    plain = clustersim.load("single_gpt2_1x1_a100").run()
    assert again == pytest.approx(result.summary["step_time_s"] - plain.summary["step_time_s"], rel=0.02)
    found = breakdown(result.timeline)
    assert found.mean[found.states.index("recomputation")] > 0.1


def test_explain_prints_it_and_its_json_has_it(tmp_path):
    path = tmp_path / "run.npz"
    result = ran("ddp")
    result.save(path)
    said = CliRunner().invoke(cli, ["explain", str(path)]).output
    assert "from peak to MFU, % of time" in said
    assert f"{100 * result.summary['mfu']:.1f}" in said.partition("   MFU ")[2].splitlines()[0]
    written = json.loads(CliRunner().invoke(cli, ["explain", str(path), "--json"]).output)["waterfall"]
    assert written[0]["useful_s"] / written[0]["step_s"] == pytest.approx(result.summary["mfu"])


def test_a_saved_run_has_the_same_waterfall(tmp_path):
    save_run(ran("ddp").timeline, tmp_path / "run.npz")
    assert waterfall(load_run(tmp_path / "run.npz").timeline) == waterfall(ran("ddp").timeline)


def test_bars_of_the_picture_end_at_the_mfu():
    result = ran("ddp")
    figure = result.plot("waterfall")
    *_, last = figure.axes[0].patches
    assert last.get_width() == pytest.approx(100 * result.summary["mfu"], abs=0.1)
    assert "From peak to an MFU of" in plots.alt_text(figure)


def test_without_flops_there_is_no_picture_and_no_table():
    rows = waterfall(run(toy.program([Compute("a", 1.0)], ranks=1)))
    assert rows[0].lost == {"kernels": 1.0}
    assert table(rows) == ([], [])
    with pytest.raises(ProgramError, match="no FLOPs are known"):
        plots.waterfall(rows)


def test_every_explanation_has_one():
    assert explain(ran("slow").timeline).waterfall[0].lost["uneven"] > 0


@pytest.mark.parametrize("name", ["fsdp", "pipeline", "async", "slow"])
def test_what_an_op_took_is_that_of_its_span_on_the_pieces_rank(name):
    timeline = ran(name).timeline
    cut = steady_pieces(timeline)
    computes = cut.op >= 0
    who, op = cut.owner[computes], cut.op[computes]
    spans = timeline.spans(cut.ranks.tolist())
    took = {(r, o): end - start for r, o, _, start, end in zip(*(spans[c].tolist() for c in spans), strict=True)}
    expected = [took[rank, i] for rank, i in zip(cut.ranks[who].tolist(), op.tolist(), strict=True)]
    assert len(expected)
    assert seconds_of_ops(timeline, cut, who, op).tolist() == expected
