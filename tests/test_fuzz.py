"""A small share of the fuzz harness, and physics of random scenarios: what must hold whatever a file says."""

from __future__ import annotations

import fuzz
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustersim import scenario
from clustersim.core.paths import json_text

KINDS = fuzz.kinds()


@pytest.mark.parametrize("name", KINDS)
def test_whatever_a_file_holds_the_answer_is_an_answer_or_one_line(name, request):
    tally = fuzz.Tally()
    fuzz.play(KINDS[name], request.config.getoption("--fuzz-budget"), tally)
    assert not tally.wrong, "\n".join(tally.wrong.values())


# ---- metamorphic -----------------------------------------------------------------------------------------------------


@st.composite
def runs(draw):
    """Changes that make a small scenario, of a strategy whose steps are in lockstep."""
    kind = draw(st.sampled_from(["ddp", "fsdp", "zero"]))
    strategy = {"kind": kind, "micro_batch_size": draw(st.sampled_from([1, 4, 16]))}
    if kind == "zero":
        strategy["zero_optimization"] = {"stage": draw(st.integers(1, 3))}
    return {
        "strategy": strategy,
        "cluster.topology": draw(st.sampled_from(["dgx-1v", "hgx-a100", "pcie-a100"])),
        "cluster.nodes": draw(st.integers(1, 2)),
        "cluster.gpus_per_node": draw(st.sampled_from([1, 2, 4])),
        "model.name": draw(st.sampled_from(["resnet18", "gpt2"])),
        "run.jitter": draw(st.sampled_from([0.0, 0.05])),
        "run.steps": 3,
    }


def step(changes, **more):
    return scenario.load("ddp_resnet50_1x8_v100", changes | more).run()


@settings(max_examples=8)
@given(runs())
def test_a_step_is_its_parts_and_faster_links_do_not_make_it_slower(changes):
    run = step(changes)
    shares = run.summary["phase_shares"]
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-6)
    assert all(share >= -1e-9 for share in shares.values())
    wider = {"cluster.changes": [{"match": "node*/* <-> *", "factor": 2.0}]}
    faster = step(changes, **wider)
    # Kernels lose less to communication beside them the shorter it is, and nothing gains from a slower link.
    assert faster.summary["step_time_s"] <= run.summary["step_time_s"] * (1 + 1e-3)


@settings(max_examples=5)
@given(runs())
def test_the_same_scenario_gives_the_same_figures(changes):
    first, again = (json_text(step(changes).to_dict()) for _ in range(2))
    assert first == again
