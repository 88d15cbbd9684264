"""A pass through many equal layers is told by few of them; where they are not alike, all are played."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from test_folded_passes import WAYS

from clustersim import scenario
from clustersim.core.program import Compute
from clustersim.scenario.run.held import held
from clustersim.scenario.run.running import prepare_held
from clustersim.studies.what_if import folded_layers as layers
from clustersim.studies.what_if.folded_passes import folded_passes


def parts(way, passes, topology="hgx-h100", count=24):
    table = {
        "cluster": {"topology": topology, "nodes": 2},
        "model": {"name": "gpt2-medium", "seq_len": 1024, "dtype": "bf16", "options": {"layers": count}},
        "strategy": WAYS[way] | {"gradient_accumulation_steps": passes},
        "run": {"steps": 3, "jitter": 0.0, "optimizer": "adamw", "optimizer_impl": "fused"},
    }
    return held(scenario.from_table(table, "s.toml"))


@pytest.mark.parametrize("passes", [1, 5])
@pytest.mark.parametrize("topology", ["hgx-h100", "hgx-v100-4gpu-10g"])
@pytest.mark.parametrize("way", ["fsdp", "hsdp", "zero 2", "zero 3"])
def test_few_layers_tell_what_all_do(way, topology, passes):
    """On fast links, where kernels set the pace, and on slow ones, where transfers do."""
    few = folded_passes(parts(way, passes, topology))
    whole = folded_passes(parts(way, passes, topology), all_layers=True)
    assert (few.each is None) == (whole.each is None)
    for told, of_all in ((few.step, whole.step), (few.each, whole.each)):
        if told is None:
            continue
        for name in ("step_time_s", "compute_s", "flops"):
            assert getattr(told, name) == pytest.approx(getattr(of_all, name), rel=1e-12), name
        assert told.exposed_communication_s == pytest.approx(
            of_all.exposed_communication_s, rel=1e-9, abs=1e-12 * of_all.step_time_s
        )
        assert told.phases == pytest.approx(of_all.phases, rel=1e-11)
        assert told.links == pytest.approx(of_all.links, rel=1e-11)


def program_of(way, passes=4, count=24):
    return prepare_held(parts(way, passes, count=count), steps=2).program


@pytest.mark.parametrize("way", ["fsdp", "hsdp", "zero 3"])
def test_what_plans_try_is_played_with_few_layers(way):
    whole = program_of(way)
    short, repeats = layers.with_few_layers(whole)
    left_out = sum(kept.size * kept.left_out for kept in repeats)
    assert len(short.roles[0].ops) == len(whole.roles[0].ops) - left_out
    assert len(short.roles[0].ops) < 0.7 * len(whole.roles[0].ops)
    short.check()
    assert layers.with_few_layers(program_of(way, count=6))[1] == ()


def test_a_layer_unlike_the_others_is_left_out_of_no_repeat():
    whole = program_of("fsdp", 1)
    (role,) = whole.roles
    places = [i for i, op in enumerate(role.ops) if isinstance(op, Compute) and op.phase == "forward"]
    odd = places[len(places) // 4]
    ops = list(role.ops)
    ops[odd] = msgspec.structs.replace(ops[odd], duration=2 * ops[odd].duration)
    changed = replace(whole, roles=(replace(role, ops=tuple(ops)),))
    short, _ = layers.with_few_layers(changed)
    assert ops[odd].duration in [op.duration for op in short.roles[0].ops if isinstance(op, Compute)]


def test_repeats_that_do_not_settle_are_played(monkeypatch):
    whole = folded_passes(parts("fsdp", 2), all_layers=True)
    monkeypatch.setattr(layers, "EVEN", -1.0)
    assert folded_passes(parts("fsdp", 2)) == whole


def test_what_waits_for_a_repeat_that_is_left_out_and_for_nothing_behind_it_is_played():
    whole = program_of("fsdp", 1)
    (role,) = whole.roles
    (kept, *_) = layers.with_few_layers(whole)[1]
    missing = kept.first + layers.HALF * kept.size + 1
    ops = (*role.ops[:-1], msgspec.structs.replace(role.ops[-1], after=(missing,)))
    assert layers.with_few_layers(replace(whole, roles=(replace(role, ops=ops),)))[1] == ()
