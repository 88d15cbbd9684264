"""Whole steps of machines, models and publishers that no constant was fitted to, as a user without measurements plays
them.

Rows were chosen before any was predicted; what a publisher left open is said in ``left_open``. Each scenario is what
``clustersim new scenario`` with its options writes, as a table. The first set (1) found kinds of error that were mended
since; the second (2) was gathered after that.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from clustersim import load
from clustersim.scenario.result.trust import trust
from tests.evidence.validate_steps import validate_steps

TABLE = Path(__file__).parent / "data" / "unseen_steps.csv"
CARDS = Path(__file__).parent / "data" / "lambda_cards.csv"
# Seconds to minutes of processor time each: hundreds of GPUs, stage by stage.
LARGE = ("megascale", "nemotron4", "neox", "flagperf-llama3", "flagperf-llama2-70b", "swissai")


class Played(NamedTuple):
    """A row, the number of its set, and what was predicted: relative errors of its step and of its peak of memory, None
    where none is given; half-widths of the ranges that the run states."""

    name: str
    number: str
    error: float | None
    memory_error: float | None
    p50: float
    p90: float


@cache
def played() -> tuple[Played, ...]:
    with TABLE.open() as file:
        rows = [row for row in csv.DictReader(file) if not row["id"].startswith(LARGE)]
    found = []
    for row in rows:
        table = json.loads(row["scenario"])
        table["run"].setdefault("steps", 3)
        run = load(table).run()
        said = trust(run.prepared)
        error = run.summary["step_time_s"] / float(row["step_s"]) - 1.0 if row["step_s"] else None
        memory = None
        if row["memory"]:
            held = run.memory.allocated if row["memory"] == "allocated" else run.memory.reserved
            memory = held / 2**30 / float(row["memory_gib"]) - 1.0
        found.append(Played(row["id"], row["set"], error, memory, said.p50, said.p90))
    return tuple(found)


def steps_of(number: str) -> list[Played]:
    return [p for p in played() if p.number == number and p.error is not None]


def errors(rows: Sequence[Played]) -> np.ndarray:
    """Absolute relative errors of steps."""
    return np.abs([p.error for p in rows if p.error is not None])


def test_steps_that_nobody_tuned_for_are_predicted() -> None:
    off = errors(steps_of("1"))
    assert len(off) == 72
    assert np.median(off) < 0.10
    assert np.percentile(off, 90) < 0.30


def test_a_second_set_of_steps_is_predicted() -> None:
    """Missed most: fp32 and bf16 of MI100, one GPU that its publisher has twice as fast as each of sixteen, VGG in
    fp32."""
    off = errors(steps_of("2"))
    assert len(off) == 54
    assert np.median(off) < 0.135
    assert np.percentile(off, 90) < 0.32


def test_one_code_is_predicted_on_eighteen_gpus() -> None:
    """GPT-2 with torch.compile, B200 to RTX A4000. Missed most: one H100 NVL that was slower than an H100 PCIe, and Ada
    cards of 300 W."""
    names = ("gpt2-b200", "gpt2-h", "gpt2-l4", "gpt2-a", "gpt2-rtx")
    off = errors([p for p in steps_of("1") if p.name.startswith(names)])
    assert len(off) == 18
    assert np.median(off) < 0.06
    assert np.percentile(off, 90) < 0.235


def test_cards_of_a_known_publisher_are_predicted() -> None:
    """RTX 8000, 3090, A6000, 6000 Ada and 4090 and both H100s in Lambda's table: the gain of eager 16-bit code on cards
    was fitted to them. Missed most: Transformer-XL, whose host decides on H100."""
    score = validate_steps(CARDS).overall
    assert score.n_cases == 84
    assert (score.median_abs_rel_error or 1.0) < 0.09
    assert (score.p90_abs_rel_error or 1.0) < 0.26


def test_ranges_hold_on_steps_that_nobody_tuned_for() -> None:
    """Half of the rows should lie within p50 and nine tenths within p90: ranges are too narrow for such rows."""
    for number, half, most in (("1", 0.39, 0.81), ("2", 0.25, 0.86)):
        known = steps_of(number)
        assert np.mean([abs(p.error or 0.0) <= p.p50 for p in known]) > half
        assert np.mean([abs(p.error or 0.0) <= p.p90 for p in known]) > most


def test_peaks_of_memory_that_nobody_tuned_for_are_predicted() -> None:
    """Allocated, or reserved where publishers read that or nvidia-smi. Missed most: a GPT whose loss stays in 16 bits
    (first set), and MI100's (second)."""
    for number, count, median, most in (("1", 35, 0.125, 0.20), ("2", 12, 0.08, 0.43)):
        off = np.abs([p.memory_error for p in played() if p.number == number and p.memory_error is not None])
        assert len(off) == count
        assert np.median(off) < median
        assert np.percentile(off, 90) < most
