"""Two runs on one axis, and which ranks are worth a trace."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import toy
from click.testing import CliRunner

import clustersim
from clustersim import engine
from clustersim.app import plots
from clustersim.app.cli.common import rank_words
from clustersim.app.cli.run import run as run_command
from clustersim.core.program import Compute
from clustersim.files import slices as slices_of_timeline


def run(seconds, steps=2, ranks=2):
    ops = [Compute(f"fwd {s}", seconds, step=s, phase="forward") for s in range(steps)]
    topology = toy.star(ranks)
    return engine.simulate(toy.program(ops, ranks=ranks), topology, toy.mesh(topology))


def bars(figure):
    """(begin, end, height) of every bar that is no idle background."""
    found = []
    for collection in figure.axes[0].collections:
        for path in getattr(collection, "get_paths", list)():
            (x0, y0), (x1, y1) = path.get_extents().min, path.get_extents().max
            found.append((x0, x1, (y0 + y1) / 2))
    return found


def test_both_last_steps_begin_at_zero_and_the_axis_is_as_long_as_the_longer():
    figure = plots.gantt_pair(("A: quick", run(1.0)), ("B: slow", run(4.0)))
    axes = figure.axes[0]
    assert axes.get_xlim() == (0.0, 4.0)
    ends = sorted({round(high, 6) for low, high, _ in bars(figure) if low == 0.0})
    assert ends == [1.0, 4.0]
    lows = [low for low, high, _ in bars(figure) if high > low]
    assert min(lows) == 0.0  # nothing of an earlier step, though the runs are at 1 s and 4 s by then
    said = [text.get_text() for text in axes.texts]
    assert "A: quick: 1 s" in said
    assert "B: slow: 4 s" in said
    assert plots.alt_text(figure).endswith("A: quick takes 1 s, B: slow takes 4 s.")


def test_the_last_step_begins_when_the_one_before_has_ended():
    ops = [Compute("a", 5.0, step=0), Compute("b", 1.0, step=1), Compute("c", 3.0, step=2)]
    topology = toy.star(1)
    timeline = engine.simulate(toy.program(ops, ranks=1), topology, toy.mesh(topology))
    assert plots.last_step(timeline) == (6.0, 9.0)


def test_of_few_ranks_all_are_worth_a_trace_and_of_many_some_whole_nodes():
    assert plots.worth_a_trace(run(1.0, ranks=8)) == tuple(range(8))
    timeline = clustersim.load("ddp_resnet50_1x8_v100", {"run.steps": 2, "cluster.nodes": 16}).run().timeline
    chosen = np.array(plots.worth_a_trace(timeline))
    assert set(plots.representatives(timeline)) <= set(chosen.tolist())
    assert len(chosen) <= 4 * 8
    whole = np.bincount(timeline.rank_node[chosen], minlength=16)
    assert set(whole.tolist()) <= {0, 8}


@pytest.mark.parametrize(("slices", "expected"), [(10**6, "nodes"), (2000, "representatives"), (1, "representatives")])
def test_of_a_long_run_fewer_ranks_are_worth_a_trace(monkeypatch, slices, expected):
    timeline = clustersim.load("ddp_resnet50_1x8_v100", {"run.steps": 2, "cluster.nodes": 16}).run().timeline
    monkeypatch.setattr(slices_of_timeline, "MAX_SLICES", slices)
    remarkable = list(plots.representatives(timeline))
    nodes = np.isin(timeline.rank_node, timeline.rank_node[remarkable])
    sets = {"nodes": np.flatnonzero(nodes).tolist(), "representatives": remarkable}
    assert list(plots.worth_a_trace(timeline)) == sets[expected]


def test_a_run_writes_the_ranks_that_it_is_told_to(tmp_path):
    for name, words, ranks in (("few", "0,3-4", [0, 3, 4]), ("whole", "all", list(range(8)))):
        folder = tmp_path / name
        outcome = CliRunner().invoke(run_command, ["why_slow_gpu", "--out", str(folder), "--trace-ranks", words])
        assert outcome.exit_code == 0, outcome.output
        with gzip.open(folder / "trace.json.gz") as file:
            assert json.load(file)["clustersim"]["ranks"] == ranks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace-ranks", "all"], "--out"),
        (["--out", "run", "--trace-ranks", "7-1"], "--trace-ranks"),
        (["--out", "run", "--trace-ranks", "0-99"], "ranks 0..7"),
    ],
)
def test_ranks_that_cannot_be_traced_are_one_clear_error(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(run_command, ["why_slow_gpu", *options])
    assert outcome.exit_code
    assert message in outcome.output + str(outcome.exception)
    assert not (tmp_path / "run" / "trace.json.gz").exists()


@pytest.mark.parametrize(
    ("ranks", "world", "words"),
    [
        ([0, 1, 2, 5], 8, "ranks 0-2, 5 of 8"),
        (range(8), 8, "all 8 ranks"),
        ([3], 1024, "rank 3 of 1,024"),
        ([0], 1, "the only rank"),
    ],
)
def test_ranks_are_told_in_runs(ranks, world, words):
    assert rank_words(list(ranks), world) == words
