"""``[measured]``: a few numbers in a machine's file, or in a scenario, move its predictions; impossible ones do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustersim import collectives
from clustersim.app.cli import main
from clustersim.cluster import files as fabrics
from clustersim.collectives import fitted as fitting
from clustersim.collectives.base import Group, Request
from clustersim.core.errors import ClusterSimError, TopologyError
from clustersim.core.topology import Topology

SMALL = '{nodes = 2, size = "8 B", time = "60 us"}'
LARGE = '{nodes = 4, size = "1 GiB", busbw = "70 GB/s"}'


def machine(folder: Path, *numbers: str, extends: str = "hgx-a100-800g") -> str:
    path = folder / "mine.toml"
    path.write_text(f'name = "mine"\nextends = "{extends}"\n[measured]\nall_reduce = [{", ".join(numbers)}]\n')
    return str(path)


def seconds(topology: Topology, nodes: int, nbytes: float, kind: str = "all_reduce") -> float:
    group = Group(topology, fabrics.mesh(topology, nodes=nodes).gpus)
    return collectives.plan(Request(kind, nbytes), group, backend="nccl").time(topology.link_bandwidth)


def test_numbers_move_what_they_measured_and_everything_like_it(tmp_path):
    plain = fitting.load("hgx-a100-800g", nodes=8)
    mine = fitting.load(machine(tmp_path, SMALL, LARGE), nodes=8)
    assert seconds(mine, 2, 8.0) == pytest.approx(60e-6, rel=0.1)
    assert 2**30 * 2 * 31 / 32 / seconds(mine, 4, 2.0**30) == pytest.approx(
        70e9, rel=0.06
    )  # the law itself is unsure by 0.05
    for kind in ("all_gather", "reduce_scatter"):  # of another collective, on another scale
        assert seconds(mine, 8, 64.0, kind) > 1.1 * seconds(plain, 8, 64.0, kind)
        assert seconds(mine, 8, 2.0**31, kind) > 1.05 * seconds(plain, 8, 2.0**31, kind)


def test_a_number_that_its_kind_already_has_moves_nothing(tmp_path):
    usual = seconds(fitting.load("hgx-a100-800g", nodes=2), 2, 8.0)
    path = machine(tmp_path, f'{{nodes = 2, size = "8 B", time = "{usual * 1e6:.4f} us"}}')
    found = fitting.informed(fabrics.load(path).measured, path)
    assert not found.found.constants
    assert fabrics.load(path).calibration is None


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (['{nodes = 4, size = "1 GiB", busbw = "2 TB/s"}'], "faster than the wires allow"),
        (['{nodes = 2, size = "8 B", time = "50 ms"}'], "more than 100 times"),
        (['{nodes = 2, size = "8 B"}'], "either time"),
        (['{nodes = 2, size = "8 B", time = "60 us", busbw = "1 GB/s"}'], "not both"),
        (['{nodes = 2, size = "eight", time = "60 us"}'], r"\[0\].size"),
        (['{nodes = 2, gpus = 9, size = "8 B", time = "60 us"}'], "9 GPUs a node"),
        ([SMALL, '{nodes = 2, size = "8 KiB", time = "20 us"}'], r"contradicts \$.measured.all_reduce\[1\]"),
        (
            ['{nodes = 4, size = "4 GiB", time = "90 ms"}', '{nodes = 4, size = "1 GiB", time = "800 ms"}'],
            "contradicts",
        ),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_the_bound(tmp_path, numbers, words):
    with pytest.raises(TopologyError, match=words) as raised:
        fitting.load(machine(tmp_path, *numbers), nodes=4)
    assert "$.measured.all_reduce[" in str(raised.value)


def test_a_misspelt_field_is_told_with_the_nearest(tmp_path):
    with pytest.raises(TopologyError, match="did you mean 'busbw'"):
        fitting.load(machine(tmp_path, '{nodes = 2, size = "8 B", busbww = "1 GB/s"}'))


def test_check_says_how_far_the_machine_is_from_its_kind(tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["check", machine(tmp_path, SMALL, LARGE)])
    said = capsys.readouterr().out
    assert "as a whole, against its kind: host +" in said
    assert "all_reduce of 8 B over 2 node(s): 60 us measured" in said


def test_a_scenario_may_bring_the_numbers(tmp_path):
    from clustersim import scenario
    from clustersim.scenario.parts import machine as machine_of

    text = '[cluster]\ntopology = "hgx-a100-800g"\nnodes = 2\n{}\n[model]\nname = "gpt2"\n[strategy]\nkind = "ddp"\n'
    times = []
    for table in ("", f"measured = {{all_reduce = [{SMALL}]}}"):
        path = tmp_path / "run.toml"
        path.write_text(text.format(table))
        times.append(seconds(machine_of(scenario.load(path))[0], 2, 8.0))
    assert times[0] < 50e-6
    assert times[1] == pytest.approx(60e-6, rel=0.1)
    path.write_text(text.format('measured = {all_reduce = [{nodes = 2, size = "8 B"}]}'))
    with pytest.raises(ClusterSimError, match=r"either time.*cluster.measured"):
        machine_of(scenario.load(path))
