"""What may run out of memory rules nothing out that has room, and what does not fit is told by what comes nearest."""

from __future__ import annotations

import pytest

from clustersim.studies import plan as planner
from clustersim.studies.plan.candidates import PlanCandidate, StrategyForm
from clustersim.studies.plan.knobs import DEGREES
from clustersim.studies.plan.options import PlanOption, SearchResult
from clustersim.studies.plan.spec import from_table
from clustersim.studies.plan.untried import offloads

TIGHT = {
    "title": "GPT-2 XL on 80 GB",
    "model": {"name": "gpt2-xl", "seq_len": 1024, "dtype": "bf16", "implementation": "fused"},
    "machines": [{"topology": "hgx-a100", "nodes": [1]}],
    "batch": {"samples": [128, 128]},
    "limits": {"memory_margin": 0.0},
    "try": {
        "micro_batch_size": [16],
        "activation_checkpointing": ["none", "full"],
        "strategies": [{"kind": "ddp"}],
    },
    "run": {"steps": 2},
}
"""Without checkpointing the fastest option needs nearly all of a GPU."""
STAGES = {"parallel": {"pp": [2]}, "micro_batch_size": [32]}
"""The same in two stages."""


@pytest.mark.parametrize(
    "read", [from_table(TIGHT), from_table({**TIGHT, "try": TIGHT["try"] | STAGES})], ids=["whole", "split"]
)
def test_the_front_has_what_has_room_wherever_anything_has(read, tmp_path, monkeypatch):
    """What most likely ran out of memory was taken, and what fits beside it was "beaten" by it and never run."""
    monkeypatch.setattr("clustersim.studies.plan.searching.ROUND", 1)
    pruned = planner.search(read, "plan.toml", tmp_path / "pruned", planner.SearchOptions(jobs=1))
    every = planner.search(read, "plan.toml", tmp_path / "every", planner.SearchOptions(jobs=1, exhaustive=True))
    named = [[(option.candidate.number, option.has_room) for option in found.front] for found in (pruned, every)]
    assert named[0] == named[1]
    assert sorted(room for _, room in named[0]) == [False, True]
    for option in pruned.options:
        if option.by is not None and option.bound is not None and not option.bound.tight:
            assert pruned.options[option.by].has_room, option.candidate.label()


TOO_LARGE = {
    "title": "13B on four A100 of 40 GB",
    "model": {"name": "llama2-13b", "seq_len": 1024, "dtype": "bf16"},
    "machines": [{"topology": "hgx-a100-4gpu-4x200g", "nodes": [1]}],
    "batch": {"samples": [64, 64]},
    "try": {
        "micro_batch_size": [1],
        "activation_checkpointing": ["full"],
        "strategies": [{"kind": "ddp"}, {"kind": "fsdp"}],
    },
}
OFFLOADED = {"kind": "zero", "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def test_where_nothing_fits_the_option_that_needs_least_is_named_and_offload_as_not_tried(tmp_path):
    """The first option was named, which needed 136.9 GiB where another needed 51."""
    answer = planner.plan(from_table(TOO_LARGE), tmp_path, jobs=1)
    why = answer.places[0].why
    assert "none fits; the least has fsdp" in why
    assert "not tried: optimizer states on the host" in why
    assert "Not tried: optimizer states on the host" in answer.verdict


def test_what_is_on_the_host_is_an_offload():
    assert offloads(OFFLOADED)
    assert offloads({"kind": "fsdp", "cpu_offload": True})
    assert not offloads({"kind": "fsdp"})
    assert not offloads({"kind": "zero", "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}})


@pytest.mark.parametrize("away", [{"device": None}, {"device": "nvme"}])
def test_what_no_run_has_on_the_host_is_no_offload(away):
    """A second reading of the table took both for one; a run keeps all on the GPU, or refuses the knob."""
    assert not offloads({"kind": "zero", "zero_optimization": {"stage": 2, "offload_optimizer": away}})


def test_a_knob_that_another_option_of_the_same_name_lacks_is_told_each_time():
    """Two options were called "ddp, pp 2": one of two chunks a stage, and one of a single chunk, which has no such
    knob."""
    degrees = dict.fromkeys(DEGREES, 1) | {"pp": 2}
    machine = from_table(TIGHT).machines[0]
    options = []
    for number, knobs in enumerate([("vpp 2", "order llama3"), ("order llama3",)]):
        form = StrategyForm({"kind": "ddp"}, {}, "ddp, pp 2", knobs, (False, False), number, True, degrees)
        candidate = PlanCandidate(number, machine, 1, 8, form, (1, 16), "none")
        options.append(PlanOption(candidate, "simulated", on_front=not number, objectives=(-1.0, 1.0, 8.0, 1.0)))
    found = SearchResult(tuple(options), (), True)
    assert found.common == {"order llama3"}
    assert found.title(options[0]) != found.title(options[1])
