"""Fits recover planted constants, say how sure they are, refuse what rows cannot tell, and spikes move them little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from clustersim.calibrate.fit import FitResult, Knob, MeasuredCollective, NcclTimes, fit
from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group, Request
from clustersim.collectives.costs import costs_of
from clustersim.collectives.nccl_backend import choice, plan, seconds
from clustersim.core.calibrated import Calibration
from clustersim.core.costs import flat, overlaid

SIZES = 2.0 ** np.arange(3, 33)


@dataclass(frozen=True)
class Line:
    """The smallest time model: latency + size / rate, and a constant that nothing depends on."""

    sizes: np.ndarray
    measured: np.ndarray
    series: Sequence[str]
    knobs: tuple[Knob, ...] = (Knob("latency", 10e-6, 0.5), Knob("rate", 1e9, 0.3), Knob("idle", 1.0, 0.3))
    part: str = "nccl"

    def predict(self, values: Mapping[str, float], rows: np.ndarray | None = None) -> np.ndarray:
        known = {k.name: k.default for k in self.knobs} | dict(values)
        out = known["latency"] + self.sizes / known["rate"]
        return out if rows is None else out[rows]


def line(latency: float, rate: float, noise: float = 0.0, seed: int = 0, sizes: np.ndarray = SIZES) -> Line:
    exact = latency + sizes / rate
    rough = exact * np.exp(noise * np.random.default_rng(seed).standard_normal(len(sizes)))
    return Line(sizes, rough, [f"row {i}" for i in range(len(sizes))])


def said(found: FitResult) -> dict[str, str]:
    return {one.knob.name: one.refused for one in found.constants}


def test_planted_constants_are_recovered_and_an_idle_one_is_refused():
    found = fit(line(25e-6, 0.7e9))
    assert found.values == {"latency": pytest.approx(25e-6, rel=0.02), "rate": pytest.approx(0.7e9, rel=0.01)}
    assert said(found) == {"latency": "", "rate": "", "idle": "no row uses it"}
    assert (
        np.abs(np.log(found.after / found.measured)).max() < 0.02 < np.abs(np.log(found.before / found.measured)).max()
    )


def test_rows_without_small_sizes_do_not_tell_the_latency():
    found = fit(line(25e-6, 0.7e9, sizes=SIZES[-6:]))
    assert said(found)["latency"] == "the rows hardly depend on it"
    assert {one.knob.name: one.value for one in found.constants}["latency"] == 10e-6  # its default


def test_constants_that_move_together_are_not_told_apart():
    class Twins(Line):
        def predict(self, values, rows=None):
            known = {"latency": 10e-6, "rate": 1e9, "idle": 1.0} | dict(values)
            out = known["latency"] * known["idle"] + self.sizes / known["rate"]
            return out if rows is None else out[rows]

    base = line(20e-6, 1e9)
    knobs = (Knob("latency", 10e-6, 0.3), Knob("rate", 1e9, 0.3), Knob("idle", 1.0, 0.3))
    refused = {k: why for k, why in said(fit(Twins(base.sizes, base.measured, base.series, knobs))).items() if why}
    assert list(refused.items()) in (
        [("idle", "the rows cannot tell it from latency")],
        [("latency", "the rows cannot tell it from idle")],
    )


def test_intervals_cover():
    truth = {"latency": 16e-6, "rate": 0.8e9}
    inside = 0
    for seed in range(40):
        for one in fit(line(16e-6, 0.8e9, noise=0.05, seed=seed)).constants[:2]:
            assert one.low < one.value < one.high
            inside += one.low <= truth[one.knob.name] <= one.high
    assert inside >= 72  # of 80; the priors, 50 and 30 % wide, pull a little


def test_one_spike_moves_a_constant_little():
    clean = line(16e-6, 0.8e9, noise=0.02)
    spiked = replace(clean, measured=clean.measured * np.where(np.arange(len(SIZES)) == 0, 50.0, 1.0))
    assert fit(spiked).values["latency"] == pytest.approx(fit(clean).values["latency"], rel=0.03)


# ---- NCCL -----------------------------------------------------------------------------------------------------------


def rows_of(topology: str, nodes: int, kinds: Sequence[str], planted: Mapping[str, float], noise: float = 0.0):
    machine = fabrics.load(topology, nodes=nodes)
    group = Group(machine, fabrics.mesh(machine).gpus)
    rng = np.random.default_rng(1)
    found = []
    for kind in kinds:
        for size in SIZES:
            picked = choice(Request(kind, float(size)), group)
            exact = seconds(picked, overlaid(costs_of(group), planted))
            found.append(MeasuredCollective(exact * float(np.exp(noise * rng.standard_normal())), picked, kind))
    return tuple(found)


@pytest.mark.parametrize("topology", ["hgx-h100", "dgx-1v", "pcie-a100", "alps-gh200", "gb200-nvl72"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_the_fast_time_is_the_plans(topology, nodes):
    kinds = ("all_reduce", "reduce_scatter", "broadcast", "all_to_all", "sendrecv")
    for row in rows_of(topology, nodes, kinds, {}):
        bandwidth = row.choice.group.topology.link_bandwidth
        assert row.seconds == pytest.approx(plan(row.choice.request, row.choice.group).time(bandwidth), rel=1e-12)


def test_nccls_planted_constants_are_recovered():
    planted = {"host_floor.intel": 40e-6, "net_share.ib": 0.65, "share.nvlink/Simple": 0.7, "hop.nvlink/LL": 1.4e-6}
    rows = rows_of("hgx-h100", 4, ["all_gather", "reduce_scatter", "all_reduce"], planted, noise=0.02)
    inside = rows_of("hgx-h100", 1, ["all_gather"], planted, noise=0.02)
    found = fit(NcclTimes((*rows, *inside)))
    for name in ("host_floor.intel", "net_share.ib"):
        assert found.values[name] == pytest.approx(planted[name], rel=0.05)
    # A fit knows no more than the rows: the constants that explain them need not be unique, their intervals say so.
    for one in found.constants:
        assert one.refused or one.low <= {**flat(costs_of(rows[0].choice.group)), **planted}[one.knob.name] <= one.high
    assert np.median(np.abs(np.log(found.after / found.measured))) < 0.03
    assert np.median(np.abs(np.log(found.before / found.measured))) > 0.08


def test_one_node_tells_nothing_of_the_network():
    found = fit(NcclTimes(rows_of("hgx-h100", 1, ["all_reduce", "all_gather"], {"host_floor.intel": 30e-6})))
    assert not any(name.startswith("net_share") for name in said(found))  # nor is it offered
    assert said(found)["hop.net/Simple"] == said(found)["send_share"] == "no row uses it"
    assert found.values["host_floor.intel"] == pytest.approx(30e-6, rel=0.02)


def test_a_fit_starts_from_the_machines_own_constants():
    machine = fabrics.load("hgx-h100")
    own = Calibration(nccl={"host_floor.intel": one_of(33e-6)})
    group = Group(replace(machine, calibration=own), machine.gpus)
    row = MeasuredCollective(33e-6, choice(Request("all_reduce", 8.0), group), "case")
    assert {k.name: k.default for k in NcclTimes((row,)).knobs}["host_floor.intel"] == 33e-6


def one_of(value: float):
    from clustersim.core.calibrated import Constant

    return Constant(value, value, value)
