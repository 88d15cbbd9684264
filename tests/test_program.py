"""Program and Mesh refuse what cannot be played, and say what they hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective, Compute, Program, Recv, Role, Send

WORLD = np.arange(4).reshape(1, 4)


def program(*ops: object, n: int = 4) -> Program:
    return Program(n, (Role("worker", np.arange(n), tuple(ops)),))  # type: ignore[arg-type]


def test_every_rank_is_described_with_its_own_duration() -> None:
    shown = program(Compute("fwd", np.array([1e-3, 2e-3, 3e-3, 4e-3])), Compute("bwd", 5e-3, after=(0,)))
    for rank in range(4):
        first, second = shown.describe(rank).splitlines()
        assert f"{rank + 1} ms" in first
        assert "5 ms" in second
        assert second.endswith("after 0")


def test_transfers_are_described_by_size_and_peer() -> None:
    ops = (
        Collective("grads", "all_reduce", 2.0**20, WORLD),
        Send("push", 1024.0, np.array([1, 2, 3, 0])),
        Recv("pull", 1024.0, np.array([3, 0, 1, 2])),
    )
    lines = program(*ops).describe(2).splitlines()
    assert "all_reduce 1 MiB fp32, 1 group(s) of 4" in lines[0]
    assert "to rank 3" in lines[1]
    assert "from rank 1" in lines[2]


BAD = {
    "waits for itself": (Compute("a", 1.0, after=(0,)), "must come earlier"),
    "negative time": (Compute("a", -1.0), "one time >= 0"),
    "times of other ranks": (Compute("a", np.ones(3)), "or one per rank"),
    "unknown collective": (Collective("a", "all_reduse", 1.0, WORLD), "unknown collective"),
    "a rank twice": (Collective("a", "all_reduce", 1.0, np.array([[0, 1, 1, 2]])), "no rank twice"),
    "a root outside": (Collective("a", "broadcast", 1.0, WORLD, root=4), "not a position"),
    "a rank outside": (Collective("a", "all_reduce", 1.0, np.array([[0, 1, 2, 9]])), "outside 0..3"),
    "peers of other ranks": (Send("a", 1.0, np.array([1])), "one rank per rank"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_played_is_refused_with_role_and_op(case: str) -> None:
    op, words = BAD[case]
    with pytest.raises(ProgramError, match=words) as caught:
        program(op).check()
    assert "role 'worker', op 0 'a'" in str(caught.value)


def test_roles_hold_every_rank_once() -> None:
    whole = program(Compute("a", 1.0))
    for ranks in (np.arange(3), np.array([0, 1, 2, 2])):
        with pytest.raises(ProgramError, match="each of the 4 ranks once"):
            dataclasses.replace(whole, roles=(Role("worker", ranks, whole.roles[0].ops),)).check()
    with pytest.raises(ProgramError, match="no rank 4"):
        whole.describe(4)


def test_a_world_divides_into_nodes() -> None:
    with pytest.raises(ProgramError, match="does not divide"):
        Mesh(np.arange(12), 8)
    assert Mesh(np.arange(16), 8).n_nodes == 2
