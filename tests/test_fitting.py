"""A few numbers of a machine move what its kind is known for, as far as priors let them, and the rest with it."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from clustersim import fabrics
from clustersim.collectives.base import Group, Request
from clustersim.collectives.costs import costs_of
from clustersim.collectives.nccl_backend import choice, seconds, seconds_of
from clustersim.costs import COSTS, flat, overlaid
from clustersim.fitting import FACTORS, PRIORS, few_numbers, posterior

SHARED = ROOT.parent / "shared" / "measurements" / "nccl_tests.csv"


def test_a_linear_problem_has_its_closed_form():
    rng = np.random.default_rng(0)
    slopes, sigma, spread = rng.standard_normal((5, 3)), np.array([0.1, 0.2, 0.1, 0.3, 0.1]), np.array([0.5, 0.2, 0.4])
    truth = np.array([0.1, -0.1, 0.2])
    found = posterior(lambda z: slopes @ z, slopes @ truth, sigma, spread)
    hessian = slopes.T @ (slopes / sigma[:, None] ** 2) + np.diag(spread**-2.0)
    assert found.moved == pytest.approx(np.linalg.solve(hessian, slopes.T @ (slopes @ truth / sigma**2)), abs=1e-6)
    assert found.covariance == pytest.approx(np.linalg.inv(hessian))


def test_every_prior_and_factor_is_of_a_constant():
    names = flat(COSTS)
    assert set(PRIORS) <= set(names)
    assert all(any(factor.moves(name) for name in names) for factor in FACTORS.values())


def test_many_at_once_are_what_each_is():
    machine = fabrics.load("hgx-h100", nodes=2)
    group = Group(machine, fabrics.mesh(machine).gpus)
    kinds = ("all_reduce", "all_gather", "all_to_all", "broadcast")
    asked = [choice(Request(kind, 2.0**k), group) for kind in kinds for k in range(3, 34, 3)]
    costs = overlaid(COSTS, {"base": 9e-6, "net_share.ib": 0.7})
    assert list(seconds_of(asked, costs)) == [seconds(one, costs) for one in asked]


@settings(max_examples=15, deadline=None)
@given(st.floats(0.6, 1.6), st.floats(0.8, 1.2))
def test_three_numbers_of_a_machine_bring_its_other_sizes_nearer(host, network):
    machine = fabrics.load("hgx-a100", nodes=2)
    group = Group(machine, fabrics.mesh(machine).gpus)
    kind = costs_of(group)
    own = {name: flat(kind)[name] * host for name in ("base", "hop.net/LL", "hop.nvlink/LL", "host_floor.amd")}
    truth = overlaid(kind, {**own, "net_share.ib": min(kind.net_share["ib"] * network, 1.0)})
    numbers = [choice(Request("all_reduce", size), group) for size in (8.0, 2.0**20, 2.0**30)]
    found = few_numbers(numbers, [seconds(one, truth) for one in numbers], kind)
    for size in (2.0**10, 2.0**32):
        one = choice(Request("all_reduce", size), group)
        errors = [abs(np.log(seconds(one, costs) / seconds(one, truth))) for costs in (kind, found.costs)]
        assert errors[1] <= errors[0] + 0.02
    assert all(one.low <= one.value <= one.high for one in found.constants.values())


@pytest.mark.shared
def test_shipped_constants_are_what_the_published_tables_make_of_the_documented_ones():
    from clustersim.calibration.fit import Measured
    from clustersim.calibration.fit.learn import learn
    from clustersim.calibration.score import read_table
    from clustersim.calibration.validate_nccl import COLUMNS, measured

    if not SHARED.is_file():
        pytest.skip("no ../shared")
    rows = []
    for row in read_table(SHARED, COLUMNS):
        time, request, group = measured(row)
        rows.append((row["topology"], Measured(time, choice(request, group), row["case_id"])))
    found = learn([one for _, one in rows], [name for name, _ in rows])
    shipped = flat(COSTS)
    for name, value in found.without(np.zeros(len(rows), dtype=bool)).items():
        assert shipped[name] == pytest.approx(value, rel=0.05), name
