"""Machines of several kinds of GPU in one run: each rank at its own GPU's pace."""

import numpy as np
import pytest

import clustersim
from clustersim.core.device import device
from clustersim.core.economics import rates
from clustersim.core.facts import RunFacts
from clustersim.core.program import Compute
from clustersim.explain.waterfall import waterfall

BASE = "ddp_gpt2_xl_2x8_a100"
MIX = """
name = "mix"
[[nodes]]
type = "hgx-a100"
count = 1
[[nodes]]
type = "hgx-h100"
count = 1
[fabric]
kind = "rail_optimised"
source = "a test"
"""


@pytest.fixture
def mixed(tmp_path):
    path = tmp_path / "mix.toml"
    path.write_text(MIX)

    def loaded(scenario=BASE, **changes):
        return clustersim.load(scenario, {"cluster.topology": str(path), **changes})

    return loaded


def durations(scenario):
    role = scenario.prepare().program.roles[0]
    return [np.broadcast_to(op.duration, role.ranks.shape) for op in role.ops if isinstance(op, Compute)]


def test_each_rank_takes_the_time_its_own_gpu_takes(mixed):
    pure = [durations(clustersim.load(BASE, {"cluster.topology": name})) for name in ("hgx-a100", "hgx-h100")]
    for both, old, new in zip(durations(mixed()), *pure, strict=True):
        assert both[:8] == pytest.approx(old[:8])
        assert both[8:] == pytest.approx(new[8:])


def test_a_synchronous_step_is_that_of_the_slower_gpus_and_the_faster_wait(mixed):
    step = mixed(**{"run.jitter": 0.0}).run().summary
    old = clustersim.load(BASE, {"cluster.topology": "hgx-a100", "run.jitter": 0.0}).run().summary
    assert step["step_time_s"] == pytest.approx(old["step_time_s"], rel=0.01)
    idle = step["per_rank"]["exposed_communication_s"]
    assert idle[8:].min() > 10 * idle[:8].max()


def test_the_mfu_is_of_the_mean_peak_and_the_waterfall_ends_at_it(mixed):
    result = mixed().run()
    peaks = [device(name).peak["bf16"] for name in ("A100-SXM4-80GB", "H100-SXM5-80GB")]
    assert result.summary["peak_flops"] == pytest.approx(np.mean(peaks))
    s = result.summary
    whole = waterfall(result.timeline, RunFacts(peak_flops=s["peak_flops"], mfu=s["mfu"], hfu=s["hfu"]))[0]
    assert whole.mfu == pytest.approx(s["mfu"], rel=1e-6)
    assert sum(whole.lost.values()) + whole.useful == pytest.approx(whole.step)


def test_a_note_says_which_gpus_are_mixed(mixed):
    (note,) = [text for text in mixed().prepare().notes if text.startswith("mixed GPUs")]
    assert "8 x A100-SXM4-80GB, 8 x H100-SXM5-80GB" in note
    assert "wait for A100-SXM4-80GB" in note


def test_stages_of_a_pipeline_run_at_the_pace_of_their_gpus(mixed):
    result = mixed("1f1b_gpt2_xl_1x8_a100", **{"parallel.pp": 16, "cluster.nodes": None}).run()
    busy = {row.stage: row.compute for row in result.where[1:]}
    assert min(busy[s] for s in range(1, 8)) > 1.4 * max(busy[s] for s in range(8, 15))


def test_another_machine_comes_with_its_own_gpus():
    changed = clustersim.load(BASE, {"cluster.topology": "hgx-h100"})
    assert changed.prepare().device.name == "H100-SXM5-80GB"
    both = clustersim.load(BASE, {"cluster.topology": "hgx-h100", "cluster.device": "A100-SXM4-40GB"})
    assert both.prepare().device.name == "A100-SXM4-40GB"
    same = clustersim.load(BASE, {"cluster.topology": "hgx-a100"})
    assert same.prepare().device.name == clustersim.load(BASE).prepare().device.name


def test_a_mix_has_no_price_of_one_of_its_gpus(mixed):
    names = mixed().run().to_dict()["device"]
    assert names == "A100-SXM4-80GB and H100-SXM5-80GB"
    known = rates(names)
    assert (known.usd_per_gpu_hour, known.limit_w) == (None, device("H100").tdp)
    assert rates(names, 2.0).usd_per_gpu_hour == 2.0
