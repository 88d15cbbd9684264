"""What may run out of memory rules nothing out that has room, and what does not fit is told by what comes nearest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from clustersim.app import plots
from clustersim.app.report.plan import _scaling
from clustersim.studies import plan as planner
from clustersim.studies.plan.candidates import PlanCandidate, StrategyForm
from clustersim.studies.plan.knobs import DEGREES
from clustersim.studies.plan.options import PlanOption, SearchResult
from clustersim.studies.plan.places import _why
from clustersim.studies.plan.robust import _rivals
from clustersim.studies.plan.seen import FINALISTS, KnownCandidates
from clustersim.studies.plan.sites import machines_of
from clustersim.studies.plan.spec import from_table
from clustersim.studies.plan.untried import offloads
from clustersim.studies.plan.verdict import _cramped
from clustersim.studies.plan.why import _gains_of_risky, _roomy_rank, fate_rank, fit_of, why_lost

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
STAGES = {
    **TIGHT,
    "model": TIGHT["model"] | {"options": {"layers": 56}},
    "try": TIGHT["try"] | {"parallel": {"pp": [2]}, "micro_batch_size": [32]},
}
"""A deeper one in two stages."""


@pytest.mark.parametrize("read", [from_table(TIGHT), from_table(STAGES)], ids=["whole", "split"])
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


def _option(number, rate, runs_out):
    """An option as its ranks read it: faster ones cost less."""
    return SimpleNamespace(
        candidate=SimpleNamespace(number=number),
        state="simulated",
        result=object(),
        has_room=runs_out < 0.3,
        rate=rate,
        error=0.16,
        objectives=(1 / rate, 1 / rate),
        priced=True,
        bound=None,
    )


def test_an_alternative_that_may_run_out_of_memory_gives_way_to_what_has_room():
    """Of bf16, what ran out in one of three was listed as the best, without a word, and what has room was not."""
    safe = _option(1, 10.0, 0.0)
    risky = _option(2, 15.0, 0.5)
    assert fate_rank(risky) < fate_rank(safe)
    assert _roomy_rank(safe) < _roomy_rank(risky)


def test_what_is_beaten_and_may_run_out_of_memory_says_both(tmp_path):
    tried = TIGHT["try"] | {"strategies": [{"kind": "ddp", "bucket_cap_mb": [1, 25]}]}
    read = from_table({**TIGHT, "try": tried})
    found = planner.search(read, "plan.toml", tmp_path, planner.SearchOptions(jobs=1, exhaustive=True))
    risky = [option for option in found.options if option.counts and not option.on_front and not option.has_room]
    assert risky
    for option in risky:
        assert why_lost(option, found).endswith(fit_of(option))
        assert "likelihood of running out" in fit_of(option)


@pytest.mark.parametrize(
    ("rate", "offloads", "cramped"), [(18.0, False, True), (11.0, False, False), (18.0, True, False)]
)
def test_offload_is_told_as_not_tried_where_room_in_memory_costs_more_than_predictions_are_off(rate, offloads, cramped):
    """Seven billion parameters on eight cards of 24 GB had 10,357 tokens/s; 18,434 with the optimizer on the host."""
    searched = SimpleNamespace(front=[_option(1, 10.0, 0.05), _option(2, rate, 0.5)], offloads=offloads)
    assert _cramped(searched) == cramped


SHARED = TIGHT | {
    "try": TIGHT["try"]
    | {"micro_batch_size": [16, 32], "parallel": {"pp": [1, 2]}, "strategies": [{"kind": "ddp"}, {"kind": "fsdp"}]}
}
"""Options with a whole model beside split ones, with room in memory and without."""


@pytest.fixture
def looked_at(monkeypatch):
    """What a search knows of a space that is too large to run whole, once its sieve has looked at it."""
    monkeypatch.setattr("clustersim.studies.plan.seen.EXACT", 1)
    read = from_table(SHARED)
    seen = KnownCandidates(read, "plan.toml", *machines_of(read, "plan.toml"))
    seen.open()
    return seen


@pytest.mark.parametrize("others", ["whole", "tight"])
def test_a_split_option_with_room_is_run_whole_however_many_of_another_kind_are(looked_at, others):
    """On 32 B200 what was 19.6 % faster and had room was run roughly alone: what may run out and FSDP's whole models
    had the two whole runs of its machine, and were taken before it."""
    known = [option for option in looked_at.options if option.bound is not None]
    roomy = next(option for option in known if option.candidate.form.split and not option.bound.tight)
    roomy = replace(roomy, state="rough")
    kinds = {
        "whole": [option for option in known if not option.candidate.form.split],
        "tight": [option for option in known if option.candidate.form.split and option.bound.tight],
    }
    for option in (kinds[others] * FINALISTS)[:FINALISTS]:
        looked_at.hand_out(option, rough=False)
    assert not looked_at.spent(roomy, rough=False)
    for _ in range(FINALISTS):
        looked_at.hand_out(roomy, rough=False)
    assert looked_at.spent(roomy, rough=False)


@pytest.mark.parametrize("fastest_has_room", [True, False])
def test_what_may_run_out_of_memory_is_no_rival_in_a_robust_choice_where_the_fastest_has_room(
    fastest_has_room,
):
    """The robust choice on 32 B200 was an option that ran out with a likelihood of 58 %, which its line left out."""
    options = [_option(0, 3.0, 0.0 if fastest_has_room else 0.6), _option(1, 4.0, 0.6), _option(2, 2.0, 0.0)]
    place = SimpleNamespace(sieve=SimpleNamespace(place=lambda candidate: 0), keeps=lambda option: True)
    found = SimpleNamespace(front=options[:1], options=options)
    rivals = [option.candidate.number for option in _rivals(found, place)]
    assert rivals == ([0, 2] if fastest_has_room else [0, 1, 2])


def test_the_degrees_that_are_framed_have_the_step_of_what_is_taken(tmp_path):
    """3.053 s was framed, of an option that ran out with 58 %, where 3.23 s was taken."""
    read = from_table(STAGES)
    found = planner.search(read, "plan.toml", tmp_path, planner.SearchOptions(jobs=1, exhaustive=True))
    assert [option.has_room for option in found.front] == [True, False]
    taken, risky = found.front
    assert risky.rate > taken.rate
    (framed,) = [cell for cell in planner.told(read, found).landscape if cell.best]
    assert framed.step_s == taken.step_s


def test_the_curves_over_gpus_are_of_what_has_room(monkeypatch):
    rows = [
        SimpleNamespace(machine="m", family="ddp", gpus=gpus, rate=rate, counts=True, has_room=has_room)
        for gpus, rate, has_room in ((8, 10.0, True), (8, 14.0, False), (16, 19.0, True), (16, 28.0, False))
    ]
    drawn = []
    scaling = plots.scaling
    monkeypatch.setattr(plots, "scaling", lambda curves, **how: drawn.append(curves) or scaling(curves, **how))
    section = _scaling(SimpleNamespace(options=rows, unit="tokens"))
    assert "Of those with room in memory." in section.words
    assert drawn[0] == {"ddp": ([8, 16], [10.0, 19.0])}


@pytest.mark.parametrize(
    ("priced", "words"),
    [(True, "in anything"), (False, "in speed, GPUs and energy, and of cost nothing is known here")],
)
def test_a_machine_without_a_price_is_not_called_dearer(priced, words, monkeypatch):
    """MI300X without a price was beaten "in anything" by a B200 at 14.24 USD an hour."""
    monkeypatch.setattr("clustersim.studies.plan.places.beats", lambda best, found: best)
    best = SimpleNamespace(on_front=False, counts=True, state="simulated", priced=priced, objectives=(1.0, 1.0))
    assert _why(best, [best], SimpleNamespace(title=lambda option: "b")).endswith(f"b is no worse {words}")


def test_a_strategy_with_its_numbers_is_settled_by_what_has_room_alone(looked_at):
    """Of bf16 on 96 H200, 33 % slower than fp8 by what may run out, the best with room was TP 8, 46 % slower, and what
    took 30 % longer and had room was never run: its sort had had its runs."""
    split = [option for option in looked_at.options if option.bound and option.candidate.form.split]
    roomy = next(option for option in split if not option.bound.tight)
    place = looked_at.sieve.place(roomy.candidate)
    sort = roomy.candidate.form.sort
    fast = [2.0 * -looked_at.best[roomy.candidate.number][0]] * FINALISTS
    looked_at._rates[place, "", True] = fast
    looked_at._rates[place, sort, True] = fast
    assert not looked_at._settled(roomy, roomy, rough=True)
    looked_at._roomy_rates[place, sort, True] = fast
    assert looked_at._settled(roomy, roomy, rough=True)


def test_what_may_run_out_says_what_it_has_before_the_fastest_with_room():
    """ "may run out (54 %)" was all that was said of why an option is worth having."""
    front = [_option(0, 4.0, 0.0), _option(1, 3.9, 0.6), _option(2, 3.9, 0.6)]
    for option, energy in zip(front, (2.0, 1.8, 2.0), strict=True):
        option.objectives = (-option.rate, 1.0, 8.0, energy)
    found = SimpleNamespace(front=front, tokens=True)
    assert _gains_of_risky(front[1], found) == ["10.0% less energy per token than the fastest with room"]
    assert _gains_of_risky(front[2], found) == []
