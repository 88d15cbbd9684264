"""What is remembered is bounded, about the right thing, and never stale."""

from __future__ import annotations

import gc
import pickle
from dataclasses import dataclass, replace
from weakref import ref

import numpy as np

from clustersim import collectives, scenario
from clustersim import model as models
from clustersim.cluster import files as fabrics
from clustersim.cluster.routes import router
from clustersim.collectives.base import Group, Request
from clustersim.core.memo import ByWeight, Keeper, kept_with_first
from clustersim.explain.where import where

TOPOLOGY = """
name = "mine"
extends = "hgx-a100"
"""


@dataclass(frozen=True)
class Thing(Keeper):
    value: int


def test_answers_are_kept_with_the_object_and_are_no_part_of_its_copies():
    asked = []

    @kept_with_first(maxsize=2)
    def times(thing: Thing, factor: int) -> int:
        asked.append(factor)
        return thing.value * factor

    three = Thing(3)
    assert [times(three, 2), times(three, 2), times(three, factor=4)] == [6, 6, 12]
    assert times(replace(three, value=5), 2) == 10
    assert times(pickle.loads(pickle.dumps(three)), 2) == 6
    assert asked == [2, 4, 2, 2]
    for factor in (5, 6, 2):  # two answers at most
        times(three, factor)
    assert asked == [2, 4, 2, 2, 5, 6, 2]


def test_what_keeps_answers_goes_as_soon_as_nobody_uses_it():
    @kept_with_first(maxsize=None)
    def twice(thing: Thing) -> int:
        return thing.value * 2

    thing = Thing(3)
    assert twice(thing) == 6
    there = ref(thing)
    gc.disable()
    try:
        del thing
        assert there() is None
    finally:
        gc.enable()


def test_what_an_analysis_found_in_a_timeline_does_not_travel_with_it():
    timeline = scenario.load("ddp_resnet50_1x8_v100").run().timeline
    found = where(timeline)
    there = pickle.loads(pickle.dumps(timeline))
    assert where(timeline) is found
    assert where(there) is not found


def test_a_cache_by_weight_forgets_what_was_used_longest_ago_and_keeps_the_last_however_heavy():
    made, cache = [], ByWeight(10, float)

    def heavy(weight: int) -> int:
        return cache.get(weight, lambda: made.append(weight) or weight)

    for weight in (4, 5, 4, 6, 4, 5):  # at 6 the 5 goes, since the 4 was used after it
        heavy(weight)
    assert made == [4, 5, 6, 5]
    assert [heavy(99), heavy(99)] == [99, 99]
    assert made == [4, 5, 6, 5, 99]


def test_equal_files_are_one_topology_and_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TOPOLOGY)
    first = fabrics.load(str(path), nodes=2)
    assert fabrics.load(str(path), nodes=2) is first
    assert fabrics.load(str(path), nodes=3) is not first
    path.write_text(TOPOLOGY + '\n[[changes]]\nmatch = "node0/nic0"\nfactor = 0.5\nsource = "a test"\n')
    assert fabrics.load(str(path), nodes=2).link_bandwidth.sum() < first.link_bandwidth.sum()


def test_a_file_that_another_extends_is_read_again_too(tmp_path):
    (tmp_path / "base.toml").write_text(TOPOLOGY)
    (tmp_path / "mine.toml").write_text('name = "top"\nextends = "base.toml"\n')
    path = str(tmp_path / "mine.toml")
    first = fabrics.load(path)
    (tmp_path / "base.toml").write_text(TOPOLOGY.replace("a100", "h100"))
    assert fabrics.load(path).node_types[0].device != first.node_types[0].device


def test_a_changed_scenario_file_is_read_again(tmp_path):
    path = tmp_path / "mine.toml"
    text = scenario.load("ddp_resnet50_1x8_v100").path.read_text()
    path.write_text(text)
    before = scenario.load(path).config.micro_batch_size
    path.write_text(text.replace(f"micro_batch_size = {before}", f"micro_batch_size = {before + 1}"))
    assert scenario.load(path).config.micro_batch_size == before + 1


def test_changes_of_one_scenario_do_not_reach_the_next():
    changed = scenario.load("ddp_gpt2_xl_2x8_a100", {"model.options.layers": 2, "cluster.nodes": 3})
    assert changed.file.model.options == {"layers": 2}
    assert not scenario.load("ddp_gpt2_xl_2x8_a100").file.model.options


def test_the_same_model_is_built_once_and_another_shape_anew():
    assert models.model("gpt2") is models.model("gpt2")
    assert models.model("gpt2", layers=2) is not models.model("gpt2")
    assert models.model("resnet50") is models.model("resnet50")


def test_groups_are_equal_by_members_of_one_topology_and_plans_of_equal_groups_are_one():
    topology, other = (fabrics.load("hgx-a100", nodes=n) for n in (2, 3))
    groups = [Group(topology, topology.gpus.copy()) for _ in range(2)]
    assert groups[0] == groups[1]
    assert groups[0] != Group(other, topology.gpus)
    assert groups[0] != Group(topology, topology.gpus[::-1])
    assert groups[0] != Group(topology, topology.gpus, nccl_version=(2, 19))
    request = Request("all_reduce", 2.0**20)
    assert collectives.plan(request, groups[0]) is collectives.plan(request, groups[1])
    assert collectives.plan(request, groups[0]) is not collectives.plan(replace(request, nbytes=2.0**21), groups[0])


def test_a_degraded_machine_does_not_answer_for_the_whole_one():
    whole = fabrics.load("hgx-a100", nodes=2)
    slow = fabrics.change(whole, fabrics.Change("node0/nic*", factor=0.25))
    assert router(slow) is not router(whole)
    request = Request("all_reduce", 2.0**28)
    times = [collectives.plan(request, Group(t, t.gpus)).time(t.link_bandwidth) for t in (whole, slow, whole)]
    assert times[0] == times[2] < times[1]
    assert np.all(fabrics.load("hgx-a100", nodes=2).link_bandwidth == whole.link_bandwidth)
