"""What is advised has room in memory, and is told in words of what the run's strategy has."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

import clustersim as package
from clustersim.core.facts import DoubledBatch, RunFacts
from clustersim.explain.explain import explain
from clustersim.studies.what_if.otherwise import at_most, otherwise
from clustersim.studies.what_if.rerun import larger_batch, rerun_saving, step_time

SINGLE = "single_gpt2_1x1_a100"
FSDP = {"cluster.nodes": 1, "run.steps": 2}


@cache
def explained(samples):
    result = package.load(SINGLE, {"strategy.micro_batch_size": samples}).run()
    return result, explain(result.timeline, RunFacts.of(result.to_dict()))


def of_samples(texts):
    return [text for text in texts if text.startswith("samples a micro-batch x2")]


@pytest.mark.parametrize("samples", [16, 32])
def test_twice_the_samples_are_advised_only_where_a_run_of_them_may_fit(samples):
    result, explanation = explained(samples)
    twice, _ = explained(2 * samples)
    (bound,) = of_samples(explanation.bounds)
    assert ("would not fit in memory" in bound) == (not twice.verdict.possible)
    reruns = otherwise(result.prepared, result.timeline, explanation)
    (told,) = of_samples(reruns.text)
    assert ("would not fit in memory" in told) == (not twice.verdict.possible)
    assert "samples" not in at_most(explanation)[0]


@pytest.mark.parametrize("name", ["zero3_llama3_8b_2x8_a100", "1f1b_gpt2_xl_1x8_a100", SINGLE])
def test_what_a_saved_run_says_of_twice_the_samples_is_what_a_run_of_them_says(name):
    """It was scaled from the run's own bytes: 51 % likely to run out, where the run made again had 47 %."""
    prepared = package.load(name).prepare()
    doubled = RunFacts.of(prepared.run().to_dict()).memory.doubled
    twice = prepared.scenario.changed(larger_batch(prepared, 2.0)).prepare().verdict
    assert doubled.needed_bytes == pytest.approx(twice.use.total)
    assert doubled.state == twice.state
    assert doubled.runs_out == pytest.approx(twice.runs_out)


def test_twice_the_samples_that_may_run_out_say_how_likely():
    changes = {"cluster.nodes": 1}
    for samples in range(20, 33):
        load = package.load(SINGLE, {**changes, "strategy.micro_batch_size": 2 * samples})
        if load.prepare().verdict.state == "may run out":
            break
    else:
        pytest.fail("no batch of this model may run out")
    result = package.load(SINGLE, {**changes, "strategy.micro_batch_size": samples}).run()
    facts = RunFacts.of(result.to_dict())
    explanation = explain(result.timeline, facts)
    likely = f", but it may run out of memory (likelihood of running out {load.prepare().verdict.runs_out:.0%})"
    (bound,) = of_samples(explanation.bounds)  # as of a saved run, which is not run again
    (told,) = of_samples(otherwise(result.prepared, result.timeline, explanation).text)
    assert bound.endswith(likely)
    assert told.endswith(f"(run again){likely}")


@cache
def sharded():
    return package.load("fsdp_llama3_8b_64x8_h100", FSDP).run()


def test_fsdp_is_advised_other_units_not_other_buckets():
    texts = explain(sharded().timeline, sharded().facts()).bounds
    assert not any("bucket" in text for text in texts)
    assert any(text.startswith("another number of blocks a unit (blocks_per_unit)") for text in texts)


def test_a_rerun_of_units_is_no_worse_than_what_the_scenario_has():
    saving = rerun_saving(sharded().prepared, "bucket size", 2.0, step_time(sharded().timeline))
    assert saving is not None
    assert saving >= -1e-9


def test_a_larger_batch_is_no_remedy_where_it_does_not_fit():
    result = package.load("why_launch_bound").run()
    facts = RunFacts.of(result.to_dict())
    with_room = " ".join(explain(result.timeline, facts).causes)
    assert "a larger micro-batch (x2 fits in memory), fused kernels or CUDA graphs would help" in with_room
    short = " ".join(explain(result.timeline, _doubled(facts, "does not fit", 1.0)).causes)
    assert "them; fused kernels or CUDA graphs would help" in short


def _doubled(facts, state, runs_out):
    doubled = DoubledBatch(1e12, state, runs_out)
    return msgspec.structs.replace(facts, memory=msgspec.structs.replace(facts.memory, doubled=doubled))


def split_run():
    changes = {"cluster.nodes": 1, "model.name": "gpt2", "parallel": {"tp": 4}, "strategy.micro_batch_size": 1}
    return package.load("ddp_gpt2_xl_2x8_a100", changes).run()


def test_the_headline_of_a_split_run_says_whether_larger_micro_batches_fit():
    """It advised them whatever memory there was, but for what is certain not to fit."""
    result = split_run()
    facts = result.facts()
    assert "larger micro-batches (x2 fits in memory), CUDA graphs" in explain(result.timeline, facts).verdict
    unknown = explain(result.timeline, RunFacts()).verdict
    assert "larger micro-batches (where memory has room), CUDA graphs" in unknown
    told = "larger micro-batches (x2, memory: likelihood of running out 60%), CUDA graphs"
    assert told in explain(result.timeline, _doubled(facts, "may run out", 0.6)).verdict
    short = _doubled(facts, "does not fit", 1.0)
    assert "GPUs compute them; CUDA graphs, compiled layers" in explain(result.timeline, short).verdict


def test_a_wider_link_that_makes_the_step_longer_says_which_rings_nccl_then_finds():
    """Beside a slow NIC, "NIC bandwidth x2 costs 1.0 % of the step" stood there without a word of why."""
    slow = [{"match": "node0/nic2", "bandwidth": "50 Gb/s"}]
    result = package.load("ddp_gpt2_xl_2x8_a100", {"cluster.changes": slow}).run()
    explanation = explain(result.timeline, RunFacts.of(result.to_dict()))
    texts = otherwise(result.prepared, result.timeline, explanation).text
    (told,) = [text for text in texts if "NIC bandwidth" in text]
    assert "costs" in told
    assert "then nodes differ, and NCCL takes" in told
    assert not any(note in told for note in result.notes)
