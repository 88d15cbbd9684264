"""Sends by the thousand are planned by kind, and each is what the planner says of it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from clustersim import collectives
from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Request
from clustersim.core.program import Collective, Program, Recv, Role, Send
from clustersim.engine import images
from clustersim.engine.flows.loads import Loads
from clustersim.engine.meetings import sites
from clustersim.engine.planning import Communicators, PlanBook


@pytest.mark.parametrize("name", ["hgx-h100", "dgx-a100", "dgx-1v", "hgx-h800"])
def test_a_send_planned_with_others_of_its_kind_is_the_one_planned_by_itself(name):
    topology = fabrics.load(name, nodes=5)
    mesh = fabrics.mesh(topology)
    asked = []

    def planner(request, group):
        asked.append(group)
        return collectives.plan(request, group, "nccl")

    rng = np.random.default_rng(0)
    pairs = np.array([rng.choice(mesh.world_size, 2, replace=False) for _ in range(200)])
    request = Request("send", 2.0**24)
    alone, together = (
        PlanBook(planner, Communicators(topology, mesh), Loads(topology), congruent=c) for c in (False, True)
    )
    expected = alone.plans(request, pairs)
    each = len(asked)
    found = together.plans(request, pairs)
    assert len(asked) - each < each
    for column in ("latency", "nbytes", "alone", "moving"):
        np.testing.assert_allclose(getattr(found, column), getattr(expected, column), rtol=1e-12)
    for mine, theirs in zip(found.load.tolist(), expected.load.tolist(), strict=True):
        (links, weights), (others, shares) = together.loads.pairs[mine], alone.loads.pairs[theirs]
        order = np.argsort(others)
        assert links[np.argsort(links)].tolist() == others[order].tolist()
        np.testing.assert_allclose(weights[np.argsort(links)], shares[order], rtol=1e-12)


@pytest.mark.parametrize("name", ["hgx-h100", "dgx-a100", "dgx-1v", "hgx-h800"])
@pytest.mark.parametrize("backend", ["nccl", "ideal", "gloo"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
def test_groups_over_several_nodes_share_a_plan_only_where_it_is_what_each_would_get(name, backend, kind):
    topology = fabrics.load(name, nodes=24)
    mesh = fabrics.mesh(topology)
    asked = []

    def planner(request, group):
        asked.append(group)
        return collectives.plan(request, group, backend)

    shards = np.arange(mesh.world_size).reshape(6, -1)
    ragged = np.random.default_rng(1).permutation(mesh.world_size).reshape(-1, 6)
    alone, together = (
        PlanBook(planner, Communicators(topology, mesh), Loads(topology), congruent=c) for c in (False, True)
    )
    for groups, fewer in ((shards, backend != "gloo"), (shards.T, backend != "gloo"), (ragged[:16], False)):
        for request in (Request(kind, 2.0**24), Request(kind, 2.0**14)):
            begin = len(asked)
            expected = alone.plans(request, groups)
            each = len(asked) - begin
            found = together.plans(request, groups)
            assert len(asked) - begin - each <= each / (2 if fewer else 1)
            for column in ("latency", "nbytes", "alone", "moving"):
                np.testing.assert_allclose(getattr(found, column), getattr(expected, column), rtol=1e-12)
            assert [one.lower_bound for one in found.each] == pytest.approx([one.lower_bound for one in expected.each])
            for mine, theirs in zip(found.load.tolist(), expected.load.tolist(), strict=True):
                (links, weights), (others, shares) = together.loads.pairs[mine], alone.loads.pairs[theirs]
                assert sorted(links.tolist()) == sorted(others.tolist())
                np.testing.assert_allclose(weights[np.argsort(links)], shares[np.argsort(others)], rtol=1e-12)


def test_groups_routed_in_parts_are_planned_as_those_routed_at_once(monkeypatch):
    topology = fabrics.load("hgx-h100", nodes=24)
    mesh = fabrics.mesh(topology)
    ranks = np.random.default_rng(2).permutation(mesh.world_size)
    for request, groups in (
        (Request("send", 2.0**24), ranks.reshape(-1, 2)),
        (Request("all_gather", 2.0**24), np.arange(mesh.world_size).reshape(6, -1).T),
    ):
        found = []
        for edges in (2**16, 5):
            monkeypatch.setattr(images, "EDGES", edges)
            planner = partial(collectives.plan, backend="nccl")
            book = PlanBook(planner, Communicators(topology, mesh), Loads(topology), congruent=True)
            found.append((book.plans(request, groups), book.loads))
        (whole, loads), (parts, others) = found
        assert whole.latency.tolist() == parts.latency.tolist()
        for mine, theirs in zip(whole.load.tolist(), parts.load.tolist(), strict=True):
            assert [c.tolist() for c in loads.pairs[mine]] == [c.tolist() for c in others.pairs[theirs]]


def test_stages_of_a_pipeline_are_planned_together():
    topology = fabrics.load("hgx-h100", nodes=8)
    mesh = fabrics.mesh(topology)
    asked = []

    def planner(request, group):
        asked.append(group.gpus.tolist())
        return collectives.plan(request, group, "nccl")

    book = PlanBook(planner, Communicators(topology, mesh), Loads(topology), congruent=True)
    ranks = np.arange(mesh.world_size).reshape(8, 8)
    roles = []
    for stage, mine in enumerate(ranks):
        ops = [Collective("gather", "all_gather", 2.0**20, mine[None], communicator="tp")]
        ops += [Recv("in", 1e6, ranks[stage - 1])] if stage else []
        ops += [Send("out", 1e6, ranks[stage + 1])] if stage < 7 else []
        roles.append(Role(f"stage {stage}", mine, tuple(ops)))
    met = sites(Program(mesh.world_size, tuple(roles)), book)
    assert [site.plans.request.kind for site in met].count("all_gather") == 8
    assert len(asked) == 1 + 8  # one gather, and a send for each place in a node
