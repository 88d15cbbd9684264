"""How much slower a rank is than its peers, where it has one or more."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustersim import scenario
from clustersim.explain.compare import compare
from clustersim.explain.pace import pace_ratios
from clustersim.files import chrome_trace, traces
from clustersim.scenario.result import Result


def with_a_slow_rank(gpus: int) -> Result:
    """Rank 1 at half speed beside so many others, less one."""
    changes = {
        "cluster.gpus_per_node": gpus,
        "cluster.slow": [{"ranks": [1], "speed": 0.5}],
        "run.steps": 2,
        "run.jitter": 0.0,
    }
    return scenario.load("ddp_resnet50_1x8_v100", changes).run()


@pytest.mark.parametrize(("gpus", "named", "of"), [(2, "its only peer", "'s"), (4, "the median of its peers", "'")])
def test_a_rank_at_half_speed_takes_twice_the_time_of_its_peers_however_few(gpus: int, named: str, of: str) -> None:
    """Of two ranks it was said to be a third slower than a median that is half its own."""
    run = with_a_slow_rank(gpus)
    ratio = pace_ratios(run.timeline)
    assert ratio[1] == pytest.approx(2.0, rel=0.05)
    assert ratio[0] == pytest.approx(1.0, rel=0.01)
    told = run.explain()
    (warning,) = [text for text in told.warnings if "rank 1" in text]
    assert warning == f"kernels of rank 1 take {ratio[1]:.2f} times {named}{of}"
    assert f"Rank 1 is slow: its kernels take {ratio[1]:.2f} times {named}" in told.causes[0]


def test_traces_of_two_ranks_are_told_from_traces_of_two_runs(tmp_path: Path) -> None:
    """They were compared as if they were two runs, "0.7% longer" by the step that both shared."""
    timeline = with_a_slow_rank(2).timeline
    read = []
    for ranks in ([0], [1], [0, 1]):
        file = tmp_path / f"{len(ranks)}{ranks[0]}.json"
        chrome_trace.write_chrome_trace(timeline, file, ranks)
        read.append(traces.read([file]))
    first, second, both = read
    assert compare(first, second).text[0].startswith("A has rank 0 of 2, B has rank 1 of 2: if both are of one job, ")
    assert compare(first, both).text[0] == "A has rank 0 of 2, B has all 2 ranks: other ranks may have other work"
    assert not any("A has" in text for text in (*compare(first, first).text, *compare(both, both).text))
