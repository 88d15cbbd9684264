"""Chunks that FSDP gathers under a pipeline, beside the actions that PyTorch's own runtime adds."""

from __future__ import annotations

from typing import Any

import pytest

from clustersim import scenario
from clustersim.core.program import Collective
from clustersim.training.builder.unshard import regathered
from clustersim.training.schedules import schedule


def gathers_of_torch(name: str, p: int, chunks: int, m: int, rank: int) -> int:
    """UNSHARD actions that ``_add_unshard_reshard`` adds to a rank's passes of our own order."""
    schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch's pipelining")
    letters = {"F": "F", "B": "B", "I": "I", "W": "W"}
    order = schedule(name).order(p, chunks, m)[rank]
    words = [f"{a.chunk * p + rank}{letters[a.kind]}{a.microbatch}" for slot in order for a in slot]
    actions = [schedules._Action.from_str(word) for word in words]
    kinds = [action.computation_type.name for action in schedules._add_unshard_reshard(actions)]
    return kinds.count("UNSHARD")


@pytest.mark.parametrize("name", ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"])
@pytest.mark.parametrize("chunks", [2, 3, 4, 8])
@pytest.mark.parametrize("rank", [0, 3])
def test_chunks_are_gathered_again_as_torchs_runtime_gathers_them(name: str, chunks: int, rank: int) -> None:
    order = schedule(name).order(4, chunks, 8)[rank]
    gathers = sum(len(each.gathered) for each in regathered(order).values())
    assert gathers == gathers_of_torch(name, 4, chunks, 8, rank)


def gathered(vpp: int) -> tuple[int, float]:
    """All_gathers of a step of rank 0, and their bytes."""
    file = {
        "cluster": {"topology": "hgx-h100", "nodes": 1},
        "model": {"name": "gpt2", "seq_len": 128, "dtype": "bf16", "options": {"layers": 16}},
        "parallel": {"framework": "torchtitan", "pp": 4, "vpp": vpp, "microbatches": 8},
        "strategy": {"kind": "fsdp", "param_dtype": "bf16"},
        "run": {"steps": 1},
    }
    program = scenario.from_table(file).prepare().program
    role = next(role for role in program.roles if 0 in role.ranks)
    ops = [op for op in role.ops if isinstance(op, Collective) and op.kind == "all_gather"]
    return len(ops), sum(op.nbytes for op in ops)


def test_four_chunks_a_rank_are_gathered_more_than_once_and_two_are_not() -> None:
    (few, once), (many, often) = gathered(2), gathered(4)
    assert few < many
    assert often > 1.5 * once
