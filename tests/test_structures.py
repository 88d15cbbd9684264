"""What a log tells of how its machine is built: a planted structure is named, and one that is not there is not."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from clustersim.app.cli import main
from clustersim.app.cli.calibrate import CalibrationReport, _lines
from clustersim.calibrate.beside_machine import beside_machine, lines
from clustersim.calibrate.fit.nccl import MeasuredCollective, NcclTimes
from clustersim.calibrate.fit.structures import Structure, explained, unexplained
from clustersim.cluster import files as fabrics
from clustersim.cluster.files import Change
from clustersim.collectives.base import Group, Request
from clustersim.collectives.costs import costs_of
from clustersim.collectives.nccl_backend import choice, seconds
from clustersim.files import traces

SIZES = [2.0**power for power in (12, 20, 22, 24, 27, 29, 31)]
AS_DESCRIBED = Structure("as described")


@cache
def choices(structure_words: str, kind: str):
    structure = PLAYED[structure_words]
    topology = structure.of(fabrics.load("hgx-h100", nodes=2))
    group = Group(topology, fabrics.mesh(topology).gpus)
    pin = structure.algorithms or None
    return [choice(Request(kind, size, algorithm=pin), group) for size in SIZES]


PLAYED: dict[str, Structure] = {}


def played(structure: Structure, measured: list[float], kind: str) -> NcclTimes:
    PLAYED[structure.words] = structure
    rows = zip(measured, choices(structure.words, kind), strict=True)
    return NcclTimes(tuple(MeasuredCollective(time, chosen, "one") for time, chosen in rows))


def told(planted: Structure, kind: str = "all_reduce"):
    PLAYED[planted.words] = planted
    measured = [seconds(chosen, costs_of(chosen.group)) for chosen in choices(planted.words, kind)]
    return explained(played(AS_DESCRIBED, measured, kind), lambda structure: played(structure, measured, kind))


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (Structure("1", {"nvls": False}), "NVLS off"),
        (Structure("2", changes=tuple(Change(f"node*/nic{i}", remove=True) for i in (1, 3, 5, 7))), "4 of 8 NICs"),
        (Structure("3", changes=(Change("node*/nic*", bandwidth=12.5e9),)), "a quarter of its rate"),
        (Structure("4", changes=(Change("node1/nic2", factor=0.3),)), "slowest NIC at 0.30"),
        (Structure("5", {"net": "ib_host"}), "no GPUDirect"),
        (Structure("6", algorithms="Ring"), "rings alone"),
        (Structure("9", {"nvls": False}, (Change("node1/nic2", factor=0.3),)), "and the slowest NIC at 0.30"),
        (Structure("10", changes=(Change("node1/nic2", factor=0.3),), algorithms="Ring"), "and the slowest NIC"),
    ],
)
def test_a_planted_structure_is_named(planted, words):
    reason = told(planted, "all_gather" if planted.node.get("net") else "all_reduce")
    assert any(words in name for name in (reason.structure.words, *reason.alike))
    assert reason.error < 0.02 < reason.described


def test_a_machine_that_is_as_described_is_left_alone():
    assert told(AS_DESCRIBED) is None
    assert told(Structure("7", changes=(Change("node1/nic2", factor=0.97),))) is None


def test_slow_calls_do_not_hide_what_large_messages_tell():
    """Eight threads of one process pay some 40 us a call more: rings alone on an H800 passed for NVLS that is slow."""
    planted = Structure("11", {"nvls": False})

    def rows(structure: Structure, measured: list[float] | None = None) -> NcclTimes:
        topology = structure.of(fabrics.load("hgx-h800"))
        group = Group(topology, fabrics.mesh(topology).gpus)
        pin = structure.algorithms or None
        chosen = [choice(Request("all_reduce", size, algorithm=pin), group) for size in SIZES]
        taken = measured or [seconds(one, costs_of(group)) + 60e-6 for one in chosen]
        return NcclTimes(tuple(map(MeasuredCollective, taken, chosen, ["one"] * len(SIZES))))

    measured = rows(planted).measured.tolist()
    reason = explained(rows(AS_DESCRIBED, measured), lambda structure: rows(structure, measured))
    assert "NVLS off" in reason.structure.words
    assert reason.error > 0.5 * reason.described  # the calls are left


def test_what_makes_some_sizes_worse_is_no_other_explanation():
    """Of NVLS that is off the answer said that Simple rings, which leave 58 % of error, cannot be told from it."""
    topology = fabrics.load("hgx-h200")
    sizes = [2.0**power for power in range(17, 33)]

    def rows(structure: Structure, measured: list[float]) -> NcclTimes:
        machine = structure.of(topology)
        group = Group(machine, fabrics.mesh(machine).gpus)
        pins = (structure.algorithms or None, structure.protocols or None)
        chosen = [choice(Request("all_reduce", size, algorithm=pins[0], protocol=pins[1]), group) for size in sizes]
        taken = measured or [seconds(one, costs_of(group)) for one in chosen]
        return NcclTimes(tuple(map(MeasuredCollective, taken, chosen, ["one"] * len(sizes))))

    measured = rows(Structure("12", {"nvls": False}), []).measured.tolist()
    described = rows(AS_DESCRIBED, measured)
    reason = explained(described, lambda structure: rows(structure, measured))
    assert "NVLS off" in reason.structure.words
    assert not any("Simple" in words for words in reason.alike)


def test_what_nothing_explains_is_said():
    """A log of another machine, 2.8 times slower than expected, was told nothing."""
    times = played(AS_DESCRIBED, [1.0] * len(SIZES), "all_reduce")
    expected = times.predict({})
    for factor, told in ((1.05, 0), (1.15, 0), (1.25, 1), (1.5, 2), (0.5, 2)):
        said = list(unexplained(times.classes, factor * expected, expected, "NVLS off"))
        assert len(said) == told
        assert all(f"{factor:.2f} times those expected" in line for line in said)


def test_what_is_written_is_what_was_played(tmp_path):
    structure = Structure(
        "both", {"nvls": False}, (Change("node1/nic2", factor=0.3), Change("node*/nic1", remove=True))
    )
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(['name = "mine"', 'extends = "hgx-h100"', "", *structure.lines()]))
    written, altered = fabrics.load(str(file), nodes=2), structure.of(fabrics.load("hgx-h100", nodes=2))
    assert not written.node_types[0].nvls
    assert written.link_bandwidth.tolist() == altered.link_bandwidth.tolist()
    assert written.vertex_names == altered.vertex_names
    assert written.hidden_factor.tolist() == altered.hidden_factor.tolist()


def test_it_is_told_in_a_line_with_what_it_is_not_told_from():
    report = CalibrationReport(
        [], {}, {}, "nccl", None, 0.0, {}, 1.0, "4 of 8 NICs", 0.3, 0.01, True, ("half the rate",)
    )
    assert "explained by 4 of 8 NICs, error 1.0% above 64 KiB where 30.0% is without" in next(_lines(report))
    assert "half the rate" in list(_lines(report))[1]


def test_a_log_stands_beside_what_its_machine_should_do(tmp_path, capsys):
    """What should I get, and what is wrong? In one command."""
    rows = ["case_id,topology,nodes,ranks,collective,dtype,size_bytes,time_us"]
    PLAYED["8"] = Structure("8", changes=(Change("node1/nic2", factor=0.3),))
    for chosen in choices("8", "all_reduce"):
        request = chosen.request
        micros = seconds(chosen, costs_of(chosen.group)) * 1e6
        rows.append(f"one,hgx-h100,2,16,all_reduce,float,{int(request.nbytes)},{micros:.3f}")
    table = tmp_path / "all_reduce.csv"
    table.write_text("\n".join(rows) + "\n")
    with pytest.raises(SystemExit) as done:
        main(["trace", str(table), "--topology", "hgx-h100"])
    printed = capsys.readouterr().out
    assert not done.value.code
    assert sum(line.startswith("all_reduce") for line in printed.splitlines()) == len(SIZES)
    assert "slowest NIC at 0.30" in printed


def test_a_log_stands_beside_a_calibrated_machine_as_it_is_calibrated(tmp_path):
    """What was fitted to a log predicts it where the log is put beside it, and says so."""
    rows = ["case_id,nodes,ranks,collective,dtype,size_bytes,time_us"]
    rows += [f"one,2,16,all_gather,float,{1 << i},{80 + (1 << i) / 2e5:.3f}" for i in range(10, 16)]
    table = tmp_path / "all_gather.csv"
    table.write_text("\n".join(rows) + "\n")
    machine = 'name = "mine"\nextends = "hgx-h100"\n'
    constants = '[calibration]\ndate = "2026-11-01"\n[calibration.nccl]\n"hop.nvlink/LL" = {value = "5 us"}\n'
    shipped, calibrated = tmp_path / "shipped.toml", tmp_path / "calibrated.toml"
    shipped.write_text(machine)
    calibrated.write_text(machine + constants)
    before, after = (beside_machine(traces.read([table]), str(file)) for file in (shipped, calibrated))
    assert (before.constants, after.constants) == ("as shipped", "as fitted 2026-11-01")
    assert all(row.expected_s > 1.5 * plain.expected_s for row, plain in zip(after.rows, before.rows, strict=True))
    assert "constants as fitted 2026-11-01, beside" in next(lines(after))


def test_a_capture_is_not_taken_for_a_log_of_nccl(capsys):
    capture = Path(__file__).parent / "data" / "gloo" / "2_ranks"
    with pytest.raises(SystemExit) as done:
        main(["trace", str(capture), "--topology", "hgx-h100"])
    assert done.value.code == 2
    assert "clustersim validate capture" in capsys.readouterr().err
