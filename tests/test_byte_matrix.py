"""An all-to-all whose pairs differ: bytes are conserved, the busiest link decides, and even is what it always was."""

from __future__ import annotations

import pickle
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustersim.cluster import files as fabrics
from clustersim.collectives import plan
from clustersim.collectives.base import Group, Plan, Request
from clustersim.collectives.direct import DIRECT
from clustersim.core.byte_matrix import byte_matrix
from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective
from clustersim.engine import simulate
from tests.toy import program

BACKENDS = ("nccl", "ideal", "gloo")
MiB = 2.0**20


@cache
def group(per_node: int, nodes: int) -> Group:
    topology = fabrics.load("hgx-h100", nodes=nodes)
    return Group(topology, np.concatenate([topology.node_gpus(i)[:per_node] for i in range(nodes)]))


def asked(rows: object, nbytes: float, members: Group, backend: str) -> Plan:
    return plan(Request("all_to_all", nbytes, matrix=byte_matrix(rows)), members, backend)  # type: ignore[arg-type]


def time(made: Plan, members: Group) -> float:
    return made.time(members.topology.link_bandwidth)


def even(n: int) -> np.ndarray:
    return np.full((n, n), 1.0 / n)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", [(8, 1), (4, 2), (1, 4)])
def test_an_even_matrix_gives_exactly_what_no_matrix_gives(backend: str, place: tuple[int, int]) -> None:
    members = group(*place)
    without = plan(Request("all_to_all", 64 * MiB), members, backend)
    made = asked(even(members.size), 64 * MiB, members, backend)
    assert made is without


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", [(8, 1), (4, 2), (1, 4)])
def test_a_nearly_even_matrix_takes_nearly_as_long(backend: str, place: tuple[int, int]) -> None:
    members = group(*place)
    rows = even(members.size)
    rows[0, 1] *= 1 + 1e-9
    without = plan(Request("all_to_all", 64 * MiB), members, backend)
    assert time(asked(rows, 64 * MiB, members, backend), members) == pytest.approx(time(without, members), rel=1e-6)


@pytest.mark.parametrize("place", [(8, 1), (4, 2)])
def test_one_pair_alone_is_a_send_on_the_textbook_machine(place: tuple[int, int]) -> None:
    members = group(*place)
    rows = np.zeros((members.size, members.size))
    src = 1
    dst = members.size - 1
    rows[src, dst] = 1.0
    made = asked(rows, 256 * MiB, members, "ideal")
    pair = Group(members.topology, members.gpus[[src, dst]])
    send = plan(Request("send", 256 * MiB), pair, "ideal")
    assert time(made, members) == pytest.approx(time(send, pair), rel=1e-9)
    assert set(made.links.tolist()) == set(send.links.tolist())


matrices = st.integers(2, 8).flatmap(
    lambda n: st.lists(st.lists(st.floats(0, 2), min_size=n, max_size=n), min_size=n, max_size=n)
)


@given(matrices)
@settings(max_examples=40, deadline=None)
def test_members_send_and_receive_what_the_matrix_says(rows: list[list[float]]) -> None:
    n = len(rows)
    traffic = DIRECT.traffic(Request("all_to_all", 1.0, matrix=byte_matrix(rows)), group(n, 1), ())
    away = np.array(rows) * (1 - np.eye(n))
    assert np.bincount(traffic.src, traffic.fraction, n) == pytest.approx(away.sum(axis=1))
    assert np.bincount(traffic.dst, traffic.fraction, n) == pytest.approx(away.sum(axis=0))
    assert (traffic.fraction > 0).all()


@given(matrices)
@settings(max_examples=40, deadline=None)
def test_no_backend_beats_the_bound_of_a_matrix(rows: list[list[float]]) -> None:
    members = group(len(rows), 1)
    for backend in ("nccl", "ideal"):
        made = asked(rows, 16 * MiB, members, backend)
        assert time(made, members) >= made.lower_bound * (1 - 1e-9)


def wire(made: Plan, members: Group) -> float:
    """Seconds of the bytes alone."""
    return time(made, members) - made.latency


def test_the_busiest_members_link_decides() -> None:
    """Behind an NVSwitch every member has its own way up and down: the largest row or column sum sets the time."""
    members = group(4, 1)
    alike = wire(plan(Request("all_to_all", 64 * MiB), members, "ideal"), members)  # each sends 3/4
    rows = even(4)
    rows[2, 0] = 3.0  # member 2 sends 3.5 without its own quarter, member 0 receives as much
    assert wire(asked(rows, 64 * MiB, members, "ideal"), members) == pytest.approx(alike * 3.5 / 0.75)
    rows[1, 0] = 2.0
    assert wire(asked(rows, 64 * MiB, members, "ideal"), members) == pytest.approx(alike * 5.25 / 0.75)


@pytest.mark.parametrize("fidelity", ["flow", "chunk"])
def test_the_engine_plays_the_matrix_of_an_op(fidelity: str) -> None:
    members = group(4, 1)
    rows = even(4)
    rows[2, 0] = 3.0
    op = Collective("all_to_all", "all_to_all", 64 * MiB, np.arange(4)[None], matrix=byte_matrix(rows))
    played = simulate(
        program([op], ranks=4), members.topology, Mesh(members.gpus, 4), backend="ideal", fidelity=fidelity
    )
    assert played.makespan == pytest.approx(time(asked(rows, 64 * MiB, members, "ideal"), members), rel=1e-3)


def test_nothing_to_send_is_over_with_its_latency() -> None:
    members = group(4, 1)
    made = asked(np.eye(4), 64 * MiB, members, "nccl")
    assert time(made, members) == made.latency > 0
    assert not len(made.links)


def test_equal_matrices_are_one_object_also_after_a_copy() -> None:
    rows = ((0.0, 1.0), (0.5, 0.5))
    made = byte_matrix(rows)
    assert made is byte_matrix([list(row) for row in rows])
    assert pickle.loads(pickle.dumps(made)) is made


BAD = [
    (Request("all_gather", 1.0, matrix=byte_matrix(even(8))), "a byte matrix goes with all_to_all, not all_gather"),
    (Request("all_to_all", 1.0, matrix=byte_matrix(even(4))), "a byte matrix of 4 members for a group of 8"),
    (
        Request("all_to_all", 1.0, algorithm="ring", matrix=byte_matrix(even(8))),
        "'ring' sends even parts; use 'direct'",
    ),
]


@pytest.mark.parametrize(("request_", "message"), BAD)
def test_a_matrix_that_does_not_fit_says_so(request_: Request, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        plan(request_, group(8, 1))


@pytest.mark.parametrize(
    ("rows", "message"),
    [([[0.0], [1.0]], "2 members has 1 entries in row 0"), ([[0.0, -1.0], [0.0, 0.0]], "entry -1.0 in row 0")],
)
def test_a_matrix_is_square_and_not_negative(rows: list[list[float]], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        byte_matrix(rows)
