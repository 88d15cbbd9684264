"""One exchange of gradients: every way takes the time and moves the bytes of its formula, and the picture shows it."""

from __future__ import annotations

import numpy as np
import pytest

from clustersim.app import plots
from clustersim.cluster import files as fabrics
from clustersim.collectives import Group, Request, plan
from clustersim.core.errors import ProgramError
from clustersim.studies.what_if.exchange import SERVER, collective, exchange, exchanges

Z = 100 * 2**20
B = 25e9
DEVICES = (2, 4, 8, 16, 32, 64)
SECONDS = {
    SERVER: lambda n: 2 * n,
    "ring": lambda n: 2 * (n - 1) / n,
    "ring_unsplit": lambda n: n - 1,
    "direct": lambda n: n - 1,
    "sequential": lambda n: 2 * (n - 1),
}
"""In Z / B."""
TOTAL = {
    SERVER: lambda n: 2 * n,
    "ring": lambda n: 2 * (n - 1),
    "ring_unsplit": lambda n: n * (n - 1),
    "direct": lambda n: n * (n - 1),
    "sequential": lambda n: 2 * (n - 1),
}
"""Bytes that devices send, all together, in Z."""


@pytest.fixture(scope="module")
def rows():
    return exchanges(DEVICES, Z, SECONDS)


@pytest.mark.parametrize("how", SECONDS)
def test_every_way_takes_its_formula(rows, how):
    mine = [row for row in rows if row["how"] == how]
    assert [row["n"] for row in mine] == list(DEVICES)
    for row in mine:
        assert row["seconds"] == pytest.approx(SECONDS[how](row["n"]) * Z / B, rel=0.02)
        assert row["total_bytes"] == pytest.approx(TOTAL[how](row["n"]) * Z, rel=1e-3)


def test_a_server_is_linear_in_the_devices_where_a_ring_is_flat(rows):
    seconds = {how: np.array([row["seconds"] for row in rows if row["how"] == how]) for how in (SERVER, "ring")}
    assert seconds[SERVER] / seconds[SERVER][0] == pytest.approx(np.array(DEVICES) / 2, rel=1e-3)
    assert seconds["ring"].max() <= 2.01 * Z / B  # twice Z over a link, however many there are
    busiest = {(row["how"], row["n"]): row["busiest_bytes"] for row in rows}
    for n in DEVICES:
        assert busiest[SERVER, n] == pytest.approx(n * Z, rel=1e-3)
        assert busiest["ring", n] == pytest.approx(2 * (n - 1) / n * Z, rel=1e-6)


@pytest.mark.parametrize("how", [how for how in SECONDS if how != SERVER])
def test_playing_every_transfer_gives_the_same_time(how):
    flow, chunk = (exchange(8, Z, how, fidelity=fidelity).makespan for fidelity in ("flow", "chunk"))
    assert flow == pytest.approx(chunk, rel=1e-3)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast"])
def test_one_collective_alone_takes_what_its_plan_says(kind):
    machine = fabrics.load("hgx-a100", nodes=2)
    expected = plan(Request(kind, Z), Group(machine, machine.gpus))
    timeline = collective(machine, kind, Z)
    assert timeline.makespan == pytest.approx(expected.time(machine.link_bandwidth))
    assert [op.kind for op in timeline.ops] == [kind]


def test_an_exchange_that_cannot_be_says_why():
    with pytest.raises(ProgramError, match="takes at least two"):
        exchange(1, Z, "ring")
    with pytest.raises(ProgramError, match="no exchange 'rnig'; did you mean 'ring'"):
        exchange(4, Z, "rnig")
    with pytest.raises(ProgramError, match="no exchange 'pat'"):
        exchange(4, Z, "pat")  # gathers and scatters only


def test_the_picture_holds_both_and_the_formulas_lie_on_them(rows):
    two = [row for row in rows if row["how"] in (SERVER, "ring")]
    figure = plots.exchange_times(two, nbytes=Z, bandwidth=B)
    laws = figure.axes[0].lines[:2]
    curves = figure.axes[0].lines[2:]
    assert len(curves) == 2
    for law, curve in zip(laws, curves, strict=True):
        (n, by_law), (at, seconds) = law.get_data(), curve.get_data()
        assert list(at) == list(DEVICES)
        assert np.interp(at, n, by_law) == pytest.approx(seconds, rel=0.02)
    assert "parameter server: 16.78 ms at 2, 536.9 ms at 64" in plots.alt_text(figure)
