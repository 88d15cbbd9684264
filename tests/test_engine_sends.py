"""Sends by the thousand are planned by kind, and each is what the planner says of it."""

from __future__ import annotations

import numpy as np
import pytest

from clustersim import collectives, fabrics
from clustersim.collectives.base import Request
from clustersim.engine.loads import Loads
from clustersim.engine.planning import PlanBook


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
    alone, together = (PlanBook(planner, topology, mesh, Loads(topology), congruent=c) for c in (False, True))
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
