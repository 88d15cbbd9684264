"""What is told of memory beside runs that ran, and beside runs that ran out."""

from __future__ import annotations

from pathlib import Path
from statistics import median, quantiles

import pytest

from clustersim.core.memory_use import CONTEXT_BYTES, NEEDED_BESIDE_BYTES, NEEDED_FRAGMENTATION
from clustersim.scenario import load
from clustersim.scenario.run.held import held
from tests.evidence.room import ran, ran_out
from tests.tables import table_rows

OUT_OF_MEMORY = Path(__file__).parent / "data" / "out_of_memory.csv"


def test_what_is_needed_beside_is_what_runs_had_that_failed() -> None:
    """Middle and ninth decile of the room in blocks, and of what was neither the allocator's nor free of the card."""
    rows = [
        {name: float(cell) for name, cell in row.items() if name.endswith("_gib")} for row in table_rows(OUT_OF_MEMORY)
    ]
    reserved = [1 + row["unallocated_gib"] / row["allocated_gib"] for row in rows]
    beside = [
        row["card_gib"] - row["free_gib"] - row["allocated_gib"] - row["unallocated_gib"] - CONTEXT_BYTES / 2**30
        for row in rows
    ]
    gib = [nbytes / 2**30 for nbytes in NEEDED_BESIDE_BYTES]
    for sample, (_, middle, most), off in ((reserved, NEEDED_FRAGMENTATION, 0.005), (beside, gib, 0.05)):
        assert median(sample) == pytest.approx(middle, abs=off)
        assert quantiles(sample, n=10, method="inclusive")[-1] == pytest.approx(most, abs=off)


def test_what_ran_out_is_told_to() -> None:
    runs = list(ran_out())
    assert len(runs) >= 5
    assert all(run.feared for run in runs)
    assert sum(run.runs_out == 1 for run in runs) >= 4


@pytest.mark.slow
def test_of_what_ran_nineteen_in_twenty_are_told_to_fit() -> None:
    """Of 867 runs 164 were told to run out more likely than one in four, and 53 that they do not fit."""
    runs = list(ran())
    assert len(runs) > 800
    assert sum(run.feared for run in runs) < 0.065 * len(runs)
    assert sum(run.runs_out == 1 for run in runs) < 0.025 * len(runs)


def test_a_forward_beside_a_backward_takes_what_that_gives_back() -> None:
    """Layer by layer: two micro-batches beside each other need little more than one, not twice as much."""
    table = {
        "cluster": {"topology": "hgx-h100", "nodes": 1},
        "model": {"name": "qwen3-30b-a3b", "seq_len": 4096, "dtype": "bf16", "options": {"layers": 12}},
        "parallel": {"ep": 8, "etp": 1, "dispatcher": "alltoall", "microbatches": 4},
        "strategy": {"kind": "ddp", "framework": "megatron", "micro_batch_size": 1, "param_dtype": "bf16"},
        "run": {"steps": 2},
    }
    alone = held(load(table)).use
    paired = held(load(table | {"parallel": table["parallel"] | {"ep_overlap": True}})).use
    assert alone.largest("activations") <= paired.largest("activations") < 1.2 * alone.largest("activations")
    assert paired.allocated < 1.1 * alone.allocated


def test_experts_outside_of_fsdp_are_not_gathered_and_their_gradients_stay_narrow() -> None:
    """8 bytes a parameter of experts that one rank alone has: itself, its gradient and two moments, all of 16 bits."""
    table = {
        "cluster": {"topology": "hgx-h100", "nodes": 1},
        "model": {"name": "qwen3-30b-a3b", "seq_len": 1024, "dtype": "bf16", "options": {"layers": 4}},
        "parallel": {"framework": "torchtitan", "ep": 8, "dispatcher": "alltoall", "microbatches": 2},
        "strategy": {"kind": "fsdp", "orig_dtype": "bf16", "param_dtype": "bf16", "reduce_dtype": "fp32"}
        | {"no_sync": True, "reshard_after_forward": False, "micro_batch_size": 1},
        "run": {"optimizer": "adam"},
    }
    inside = held(load(table))
    outside = held(load(table | {"strategy": table["strategy"] | {"experts_outside": True}}))
    experts = sum(layer.expert_parameters for layer in inside.split.partition.stages[0].layers)
    assert inside.use.largest("gradients") - outside.use.largest("gradients") == 2 * experts
    assert inside.use.largest("gathered") - outside.use.largest("gathered") == 2 * experts
    assert inside.use.largest("optimizer_states") == outside.use.largest("optimizer_states")
    # Two ranks that share an expert shard it all the same.
    shared = table | {"parallel": table["parallel"] | {"ep": 4}}
    other = shared | {"strategy": table["strategy"] | {"experts_outside": True}}
    assert held(load(shared)).use.allocated == held(load(other)).use.allocated
