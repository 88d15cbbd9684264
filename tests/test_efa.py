"""Collectives over EFA on 16 to 256 GPUs, as publishers timed them (data/nccl/efa_groups.csv).

No fit reads them. The all_reduces of P5 were looked at as its hop was chosen; its all_to_alls were not.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from clustersim.cluster import files as fabrics
from clustersim.cluster.files import Change
from clustersim.collectives.base import Group, Request
from clustersim.collectives.costs import costs_of
from clustersim.collectives.nccl_backend import choice, seconds
from tests.tables import table_rows

TABLE = Path(__file__).parent / "data" / "nccl" / "efa_groups.csv"
ROWS = table_rows(TABLE)


@cache
def group(topology: str, nodes: int) -> Group:
    machine = fabrics.load(topology, nodes=nodes)
    return Group(machine, fabrics.mesh(machine).gpus)


def error(row: dict[str, str]) -> float:
    members = group(row["topology"], int(row["nodes"]))
    request = Request(row["collective"], float(row["size_bytes"]), algorithm=row["algorithm"] or None)
    return seconds(choice(request, members), costs_of(members)) / (1e-6 * float(row["time_us"])) - 1.0


def median_error(topology: str, collective: str, nodes: int, smallest: float = 0.0) -> float:
    errors = [
        abs(error(row))
        for row in ROWS
        if (row["topology"], row["collective"], int(row["nodes"])) == (topology, collective, nodes)
        and float(row["size_bytes"]) >= smallest
    ]
    assert errors
    return float(np.median(errors))


@pytest.mark.parametrize("nodes", [2, 4, 8, 16, 32])
def test_all_reduces_of_p5_grow_with_the_group_as_measured(nodes):
    assert median_error("aws-p5", "all_reduce", nodes) < 0.16


@pytest.mark.parametrize("nodes", [2, 4, 8, 16, 32])
def test_all_to_alls_of_p5_grow_with_the_group_as_measured(nodes):
    assert median_error("aws-p5", "all_to_all", nodes) < 0.12


def test_a_later_generation_of_efa_has_less_latency():
    p5, p6 = (group(name, 2) for name in ("aws-p5", "aws-p6-b200"))
    assert costs_of(p6).net_extra["efa"] == pytest.approx(0.65 * costs_of(p5).net_extra["efa"])


def test_a_nic_that_delivers_less_than_its_driver_reports_is_of_its_own_generation():
    slow = fabrics.change(fabrics.load("aws-p6-b200", nodes=2), Change("node*/nic*", factor=0.4))
    members = Group(slow, fabrics.mesh(slow).gpus)
    assert costs_of(members).net_extra["efa"] == costs_of(group("aws-p6-b200", 2)).net_extra["efa"]
    told = fabrics.change(fabrics.load("aws-p6-b200", nodes=2), Change("node*/nic*", bandwidth=12.5e9))
    members = Group(told, fabrics.mesh(told).gpus)
    assert costs_of(members).net_extra["efa"] == costs_of(group("aws-p5", 2)).net_extra["efa"]


def test_rings_of_p4d_take_what_two_publishers_measured():
    assert median_error("aws-p4d", "all_reduce", 2) < 0.2
    assert median_error("aws-p4d", "all_reduce", 2, smallest=2.0**27) < 0.1
    assert median_error("aws-p4d", "all_reduce", 3) < 0.1
    assert median_error("aws-p4d", "all_reduce", 4) < 0.1


def test_a_plug_in_that_promises_no_order_of_bytes_leaves_simple_alone():
    assert choice(Request("all_gather", 2.0**20), group("aws-p4d", 2)).protocol == "Simple"
