"""The verdict of a run adds up causes of one kind, and names none first whose remedy would give almost nothing back."""

from __future__ import annotations

from functools import cache

import pytest

import clustersim as package
from clustersim.app.report.content import page
from clustersim.core.facts import RunFacts
from clustersim.core.saved_run import SavedRun
from clustersim.explain.cause_kinds import FACTOR, cause_kinds
from clustersim.explain.cause_table import headline
from clustersim.explain.explain import explain, weighed_again
from clustersim.explain.stalls import causes, costliest
from clustersim.explain.step_words import LossRemedy, StepLoss
from clustersim.explain.verdict import verdict, weighed_losses
from clustersim.studies.what_if.otherwise import each_change

FEW_MICRO_BATCHES = {"cluster.nodes": 2, "run.steps": 2, "parallel.global_batch_size": 16}
"""Two machines and a step of one micro-batch: gradients over the network are exposed."""


@cache
def experts_run():
    return package.load("ep8_mixtral_8x7b_8x8_h100", FEW_MICRO_BATCHES).run()


@cache
def experts():
    return causes(experts_run().timeline)


def of_kind(cause):
    return next(kind for kind in cause_kinds(experts()) if kind.first.cause == cause)


def test_every_charge_is_in_one_kind():
    kinds = cause_kinds(experts())
    charges = [charge for kind in kinds for charge in kind.charges]
    assert sorted(map(id, charges)) == sorted(map(id, costliest(experts())))
    assert [kind.share for kind in kinds] == sorted((kind.share for kind in kinds), reverse=True)


def test_dispatch_and_combine_forward_and_backward_are_one_kind():
    kind = of_kind("kernels")
    assert len(kind.charges) == 4
    assert all(charge.subject.startswith("all_to_all") for charge in kind.charges)


def test_a_cause_of_four_sorts_of_one_collective_is_told_once():
    texts = explain(experts_run().timeline, bounded=False).causes
    limited = [text for text in texts if text.startswith("Communication kernels") and "all_to_all" in text]
    assert len(limited) == 1
    assert f"all cost {of_kind('kernels').share:.1%} of a step" in limited[0]


def test_a_verdict_adds_up_links_that_one_remedy_widens():
    kind = of_kind("link")
    assert {charge.cause for charge in kind.charges} == {"link", "shared link"}
    text = verdict(RunFacts(), experts(), {"NIC": kind.share})
    assert f"{kind.share:.1%} of the step is lost because links such as node0/nic0 -> leaf0 cannot carry more." in text


def test_what_hardly_helps_is_not_named_first():
    links = of_kind("link")
    kernels = of_kind("kernels")
    text = verdict(RunFacts(), experts(), {"NIC": 0.006})
    assert f"{kernels.share:.1%} of the step is lost because communication kernels limit 4 sorts of all_to_all" in text
    assert f"{links.share:.1%} is lost because links such as node0/nic0 -> leaf0 cannot carry more, but NIC" in text
    assert "would save no more than 0.6%" in text


def test_what_is_not_known_is_bounded_by_a_replay():
    kind = of_kind("link")
    explained = explain(experts_run().timeline)
    bounds = explained.whatif
    saving = float(bounds["saving"][bounds["knob"].tolist().index("NIC")])
    assert saving / (1 - 1 / FACTOR) >= kind.share
    assert verdict(RunFacts(), experts()) == verdict(RunFacts(), experts(), {"NIC": saving}) == explained.verdict


def test_a_run_with_the_knob_turned_is_trusted_before_its_bound():
    explained = explain(experts_run().timeline)
    assert weighed_again(explained, RunFacts(), {}) is explained
    assert "but NIC bandwidth x2" in weighed_again(explained, RunFacts(), {"NIC": 0.006}).verdict


def test_several_slow_ranks_are_told_in_the_plural():
    one = headline(experts(), "slow rank", "rank 3")
    several = headline(experts(), "slow rank", "rank 1, rank 3", several=True)
    assert one == "rank 3 is slow, and everybody waits for it"
    assert several == "rank 1, rank 3 are slow, and everybody waits for them"


@pytest.mark.parametrize("name", ["why_oversubscribed_spine", "why_launch_bound", "why_tiny_buckets"])
def test_a_planted_cause_keeps_its_verdict(name):
    result = package.load(name).run()
    kind = cause_kinds(causes(result.timeline))[0]
    assert f"{kind.share:.1%} of the step is lost because" in result.in_words
    assert "though" not in result.in_words


IMBALANCE = StepLoss(0.34, "the other stages wait for stage 7", "imbalance")
SCHEDULE = StepLoss(0.13, "the schedule has to fill and drain the pipeline", "schedule")


def test_losses_of_a_pipeline_are_weighed_by_what_was_tried_against_them():
    much = [LossRemedy("imbalance", "another layout", 0.30), LossRemedy("schedule", "zb_h1", 0.09)]
    assert [row.loss for row in weighed_losses([IMBALANCE, SCHEDULE], much)] == [IMBALANCE]
    little = [LossRemedy("imbalance", "another layout", 0.01), LossRemedy("schedule", "zb_h1", 0.09)]
    first, passed = weighed_losses([IMBALANCE, SCHEDULE], little)
    assert (first.loss, passed.loss) == (SCHEDULE, IMBALANCE)
    assert (first.share, passed.share) == (0.09, 0.01)
    assert [row.loss for row in weighed_losses([IMBALANCE, SCHEDULE], [])] == [IMBALANCE]


def test_the_verdict_of_a_pipeline_says_what_would_give_back_what_it_loses():
    """Other causes were weighed by what-ifs, and the losses of pipelines were not."""
    result = package.load("1f1b_gpt2_xl_1x8_a100").run()
    explained = explain(result.timeline, result.facts(), bounded=False)
    helps = [LossRemedy("imbalance", "a layout", 0.30), LossRemedy("schedule", "a schedule", 0.097)]
    text = weighed_again(explained, result.facts(), {}, helps).verdict
    assert text.endswith("whose head costs 5.4 layers; a layout would save 30.0% of the time per sample.")
    hardly = [LossRemedy("imbalance", "a layout", 0.01), LossRemedy("schedule", "a schedule", 0.097)]
    text = weighed_again(explained, result.facts(), {}, hardly).verdict
    assert "13.1% of the step is lost because the schedule has to fill and drain" in text
    assert "34.9% is lost because the other stages wait for stage 7" in text
    assert text.endswith("but a layout would save no more than 1.0% of the time per sample.")


def test_messages_between_stages_are_weighed_by_the_knobs_of_the_network():
    both_ways = ("node0/gpu* -> node0/nvswitch*", "node0/nvswitch* -> node0/gpu*")
    slow = [{"match": match, "factor": 0.01} for match in both_ways]
    result = package.load("interleaved_gpt2_xl_1x8_a100", {"cluster.changes": slow}).run()
    explained = explain(result.timeline, result.facts(), bounded=False)
    assert explained.verdict.endswith("is lost because nothing hides the transfers of PP.")
    text = weighed_again(explained, result.facts(), {"NVLink": 0.15}).verdict
    assert text.endswith("the transfers of PP; NVLink bandwidth x2 would save 15.0% of the time per sample.")
    text = weighed_again(explained, result.facts(), {"NVLink": 0.001}).verdict
    assert text.endswith("of PP, but NVLink bandwidth x2 would save no more than 0.1% of the time per sample.")
    text = verdict(result.facts(), explained.charged, {"NVLink": 0.15})
    assert text.endswith("NVLink bandwidth x2 would save at most 15.0% of the time per sample.")  # a bound, not a run


def test_of_exposed_transfer_it_is_told_what_is_a_slow_ranks():
    """FSDP beside a slow GPU had 14.5% of exposed transfer, which README said that faster links could save."""
    slow = {"cluster.nodes": 2, "run.steps": 2, "cluster.slow": [{"ranks": [9], "speed": 0.8}]}
    result = package.load("fsdp_llama3_8b_64x8_h100", slow).run()
    explained = explain(result.timeline, result.facts(), bounded=False)
    late = explained.charged.late_exposed / (explained.charged.workers * explained.charged.length)
    (slow_rank,) = (charge for charge in explained.charged.charges if charge.cause == "slow rank")
    assert 0.01 < late < explained.charged.share(slow_rank)
    words = f"of the exposed transfer {late:.1%} began late for a slow rank's sake, and no faster link saves it"
    assert explained.shares.endswith(words)
    told = f"{words[0].upper()}{words[1:]}.".replace("'", "&#39;")
    assert told in page(SavedRun(result.timeline, result.prepared.topology, result.facts()))


FLAPPING = [{"match": "node0/nic0", "factor": 0.001, "from": "0 s", "until": "0.1 s", "every": "1 s"}]


def test_a_link_that_flaps_is_not_said_to_be_shared():
    """It once was "transfers share node#/nic# -> leaf#", where nobody else was on it; and what if fewer steps were
    played was told as a remedy."""
    changes = {"run.steps": 6, "cluster.changes": FLAPPING}
    result = package.load("ddp_gpt2_xl_2x8_a100", changes).run()
    explained = explain(result.timeline, result.facts(), bounded=False)
    assert explained.verdict.endswith("is lost because the rate of the link node0/nic0 -> leaf0 changes in the run.")
    assert any("The link node0/nic0 -> leaf0 is slower for a while" in sentence for sentence in explained.causes)
    assert not any("shared link" in sentence for sentence in explained.path)
    did, nothing = each_change(result.prepared.scenario, result.timeline)
    assert [line.partition("=")[0] for line in did] == ["without cluster.changes"]
    assert not nothing


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ddp_gpt2_xl_2x8_a100", "Links such as node0/nic0 -> leaf0 (25 GB/s each) hold the transfers: they let 102."),
        ("why_oversubscribed_spine", "The link leaf0 -> spine0 (25 GB/s) holds the transfers: it lets 22."),
    ],
)
def test_one_link_is_not_said_to_let_more_through_than_it_has(name, words):
    """Of a NIC of 25 GB/s it was said that it lets 102.4 GB/s through: four of them do."""
    explained = explain(package.load(name).run().timeline, bounded=False)
    assert any(words in sentence for sentence in explained.causes)
