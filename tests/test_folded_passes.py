"""A whole model's step from few passes of one node is the whole run's; where passes do not repeat, none is told."""

from __future__ import annotations

import pytest

from clustersim import scenario
from clustersim.scenario.run.held import held
from clustersim.studies.plan.searching import SearchOptions, search
from clustersim.studies.plan.spec import from_table
from clustersim.studies.sweep.store import Store
from clustersim.studies.what_if import folded_passes as few
from clustersim.studies.what_if.folded import folded

BF16 = {"param_dtype": "bf16", "micro_batch_size": 2}
WAYS = {
    "fsdp": {"kind": "fsdp", **BF16},
    "hsdp": {"kind": "fsdp", "data_parallel_replicate_degree": 2, **BF16},
    "hsdp over half nodes": {"kind": "fsdp", "data_parallel_replicate_degree": 8, **BF16},
    "zero 1": {"kind": "zero", "zero_optimization": {"stage": 1}, **BF16},
    "zero 2": {"kind": "zero", "zero_optimization": {"stage": 2, "overlap_comm": True}, **BF16},
    "zero 3": {"kind": "zero", "zero_optimization": {"stage": 3}, **BF16},
    "offloaded": {"kind": "zero", "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, **BF16},
}


def made(way, passes, topology="hgx-h100", **more):
    return scenario.from_table(
        {
            "cluster": {"topology": topology, "nodes": 4},
            "model": {"name": "gpt2-medium", "seq_len": 1024, "dtype": "bf16", "options": {"layers": 6}},
            "strategy": WAYS[way] | {"gradient_accumulation_steps": passes},
            "run": {"steps": 3, "jitter": 0.0, "optimizer": "adamw", "optimizer_impl": "fused"},
        }
        | more,
        "s.toml",
    )


@pytest.mark.parametrize("passes", [1, 3, 7])
@pytest.mark.parametrize("topology", ["hgx-h100", "hgx-v100-4gpu-10g"])
@pytest.mark.parametrize("way", WAYS)
def test_few_passes_of_one_node_tell_the_whole_run(way, topology, passes):
    """On fast links, where kernels set the pace, and on slow ones, where transfers do."""
    loaded = made(way, passes, topology)
    assert few.can_fold(loaded)
    try:
        step = few.folded_passes(held(loaded)).of(passes)
    except few.PassesDiffer:
        assert topology != "hgx-h100" or passes > few.PLAYED
        return
    whole = loaded.run().summary
    told = step.step_time_s, step.compute_s, step.exposed_communication_s
    of_whole = [whole[name] for name in ("step_time_s", "compute_s", "exposed_communication_s")]
    assert told == pytest.approx(of_whole, rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("way", ["fsdp", "hsdp"])
def test_what_plans_try_repeats_itself(way):
    step = few.folded_passes(held(made(way, 6)))
    assert step.passes == few.PLAYED
    assert step.each is not None


def test_passes_that_do_not_repeat_are_not_told(monkeypatch):
    monkeypatch.setattr(few, "EVEN", -1.0)
    loaded = made("fsdp", 6)
    with pytest.raises(few.PassesDiffer):
        few.folded_passes(held(loaded)).of(6)
    assert folded(loaded).step_time_s == pytest.approx(loaded.run().summary["step_time_s"], rel=1e-12)


@pytest.mark.parametrize(
    "more",
    [
        {"run": {"steps": 3, "jitter": 0.02}},
        {"cluster": {"topology": "hgx-h100", "nodes": 4, "slow": [{"ranks": [3], "speed": 0.8}]}},
        {"cluster": {"topology": "hgx-h100", "nodes": 4, "changes": [{"match": "node0/nic0", "factor": 0.5}]}},
    ],
)
def test_ranks_that_differ_are_played(more):
    assert not few.can_fold(made("fsdp", 4, **more))


def test_a_plan_of_whole_models_has_the_answer_of_playing_all_and_plays_fewer(tmp_path):
    plan = from_table(
        {
            "model": {"name": "gpt2-medium", "seq_len": 1024, "dtype": "bf16", "options": {"layers": 6}},
            "machines": [{"topology": "hgx-h100", "nodes": [1, 2], "usd_per_gpu_hour": 2.0}],
            "batch": {"samples": [64, 256]},
            "try": {
                "micro_batch_size": [1, 2, 4],
                "activation_checkpointing": ["none", "full"],
                "strategies": [
                    {"kind": "fsdp", "data_parallel_replicate_degree": [1, 2], "param_dtype": "bf16"},
                    {"kind": "zero", "param_dtype": "bf16", "zero_optimization": {"stage": [2, 3]}},
                ],
            },
        }
    )
    found = search(plan, "plan.toml", tmp_path / "few", SearchOptions(jobs=1))
    every = search(plan, "plan.toml", tmp_path / "all", SearchOptions(jobs=1, exhaustive=True))
    for result in (found, every):
        assert result.front
    assert [option.candidate.number for option in found.front] == [option.candidate.number for option in every.front]
    whole = [option for option in every.options if option.state == "simulated"]
    told = [found.options[option.candidate.number] for option in whole]
    both = [(few, played) for few, played in zip(told, whole, strict=True) if few.state == "simulated"]
    assert len(both) > 2 * len(found.front)
    for few_passes, played in both:
        assert few_passes.result.few_passes is not None
        of_few, of_all = few_passes.result, played.result
        for name in ("step_time_s", "compute_s", "mfu", "hfu", "samples_per_s", "tokens_per_s", "peak_memory_bytes"):
            assert getattr(of_few, name) == pytest.approx(getattr(of_all, name), rel=1e-9), name
        assert of_few.phase_shares == pytest.approx(of_all.phase_shares, abs=1e-9)
        assert of_few.hottest_links[0].link == of_all.hottest_links[0].link
        assert of_few.hottest_links[0].utilisation == pytest.approx(of_all.hottest_links[0].utilisation, rel=1e-9)
    tempting = [[option.candidate.number for option in result.options if option.tempting] for result in (found, every)]
    assert tempting[0] == tempting[1]
    assert not any(row.result and row.result.few_passes is None for row in Store(tmp_path / "few").rows())
