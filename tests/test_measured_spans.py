"""A calibrated file says what was measured, and nothing else is claimed to be as sure: sizes, collectives, nodes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from clustersim.app.cli import main
from clustersim.calibrate.fit.of_logs import LogPlays
from clustersim.cluster import files as fabrics
from clustersim.collectives import fitted as fitting
from clustersim.collectives.started import started_as_measured
from clustersim.core.calibrated import Calibration, Constant, Provenance
from clustersim.core.errors import TopologyError
from clustersim.core.measured_spans import BEYOND, NOT_RECORDED, MeasuredSpan, missing_words, outside, stretches
from clustersim.core.ranges import of_collective
from clustersim.core.topology import Topology
from clustersim.files.traces.samples import Sample
from clustersim.scenario import load
from clustersim.scenario.result.trust import trust_in
from clustersim.studies.plan.robust import LARGE, uncertain
from tests.evidence.calibrations import claimed_rows, logs
from tests.tables import table_rows

TABLE = ROOT / "tests" / "data" / "measurements" / "nccl_tests.csv.gz"
SPAN = MeasuredSpan("all_reduce", 1, 8, 2.0**22, 2.0**33, 12, "single_process", (2, 26))
NCCL = {"base": Constant(5e-6, 4e-6, 6e-6)}


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(a) for a in arguments])
    return int(done.value.code or 0)


def machine_of(*spans: MeasuredSpan, nodes: int = 1) -> Topology:
    part = Calibration(nccl=NCCL, provenance=Provenance(spans=spans))
    return replace(fabrics.load("hgx-a100", nodes=nodes), name="mine", calibration=part)


def published(path: Path, publisher: str, kind: str, smallest: float) -> Path:
    """Rows of one publisher's log from a size on, as a table."""
    of_publisher = [row for row in table_rows(TABLE) if publisher in row["source"] and row["collective"] == kind]
    rows = [row for row in of_publisher if float(row["size_bytes"]) >= smallest]
    with path.open("w") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def of_large_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine calibrated on the messages of 4 MiB and more of a published log, which `-g 8` made."""
    folder = tmp_path_factory.mktemp("large")
    data = published(folder / "large.csv", "microsoft/superbenchmark", "all_reduce", 2.0**22)
    out = folder / "mine.toml"
    assert run("calibrate", data, "--topology", "hgx-a100", "-o", out) == 0
    return out


def notes(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What `collective` says below its table, which JSON says in the row's notes."""
    assert run("collective", *arguments) == 0
    text = capsys.readouterr().out
    assert run("collective", *arguments, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    for note in rows[-1]["notes"]:
        assert f"# {note}" in text
    return " ".join(rows[-1]["notes"])


def trust_of(text: str) -> str:
    return text[text.index("trust") :]


def test_sizes_that_a_log_has_not_are_not_claimed_to_be_as_sure(of_large_rows, capsys):
    own = of_large_rows.parent / "own.toml"
    own.write_text('name = "own"\nextends = "hgx-a100"\n')
    small = notes(capsys, "all_reduce", "--topology", of_large_rows, "--size", "8")
    uncalibrated = notes(capsys, "all_reduce", "--topology", own, "--size", "8")
    assert "; sizes below 4 MiB were not in the log (all_reduce)" in small
    assert trust_of(small).startswith(trust_of(uncalibrated))
    large = notes(capsys, "all_reduce", "--topology", of_large_rows, "--size", "1G")
    assert "with numbers of the machine" in large
    assert "not in the log" not in large


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("all_gather", "--size", "1G"), "all_gather was not in the log"),
        (("all_reduce", "--size", "1G", "--nodes", "2"), "all_reduce between nodes was not in the log"),
        (("all_reduce", "--size", "1M"), "sizes below 4 MiB were not in the log"),
    ],
)
def test_what_else_a_log_has_not_is_said(arguments, words, of_large_rows, capsys):
    assert words in notes(capsys, *arguments, "--topology", of_large_rows)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("all_reduce", 2.0**30, 1, 8), ""),
        (("all_reduce", 2.0**20 + 1, 1, 8), ""),  # within four times
        (("all_reduce", 2.0**20, 1, 8), "sizes below 4 MiB were not in the log (all_reduce)"),
        (("all_reduce", 2.0**36, 1, 8), "sizes above 8 GiB were not in the log (all_reduce)"),
        (("all_reduce", 2.0**30, 1, 16), "all_reduce by 16 ranks a node was not in the log, which has 8 at most"),
        (("all_gather", 2.0**30, 1, 8), "all_gather inside one node was not in the log"),
        (("broadcast", 2.0**30, 1, 8), "broadcast was not in the log"),
        (("all_gather", 2.0**30, 4, 32), ""),
        (("all_gather", 2.0**30, 5, 40), "all_gather over 5 nodes was not in the log, which has 4 at most"),
        (("all_gather", 2.0**30, 2, 16), "all_gather over 2 nodes was not in the log, which has 4 at least"),
        (("all_gather", 2.0**20, 4, 32), "sizes between 64 KiB and 1 GiB were not in the log (all_gather)"),
    ],
)
def test_what_is_outside_of_spans(call, words):
    gathered = [MeasuredSpan("all_gather", 4, 32, *ends, 9) for ends in ((8.0, 2.0**16), (2.0**30, 2.0**33))]
    assert outside((SPAN, *gathered), *call) == words


@given(st.lists(st.floats(1, 2.0**40), min_size=1, max_size=9), st.floats(1, 2.0**40))
def test_a_stretch_tells_of_a_size_where_its_ends_or_a_row_does(sizes, nbytes):
    """No size is farther from all rows than BEYOND times, and still held."""
    parts = list(stretches(sizes))
    assert sorted(sizes) == [size for part in parts for size in part]
    spans = [MeasuredSpan("send", 1, 2, part[0], part[-1], len(part)) for part in parts]
    near = any(size / BEYOND < nbytes < size * BEYOND for size in sizes)
    inside_a_gap = any(a <= nbytes <= b <= a * BEYOND**2 for a, b in pairwise(sorted(sizes)))
    assert any(span.holds(nbytes) for span in spans) == (near or inside_a_gap)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast", "sendrecv"])
@pytest.mark.parametrize("nbytes", [8.0, 2.0**20, 2.0**30])
@pytest.mark.parametrize("nodes", [1, 4, 16])
def test_outside_of_the_log_nobody_is_surer_than_without_it(kind, nbytes, nodes):
    mine = machine_of(SPAN, nodes=16)
    alone = replace(mine, calibration=None)
    calibrated, plain = (of_collective(one, nbytes, nodes, kind) for one in (mine, alone))
    if outside((SPAN,), kind, nbytes, nodes):
        assert calibrated.p50 >= plain.p50
        assert calibrated.p90 >= plain.p90
        assert calibrated.outside
    else:
        assert calibrated.known == "calibrated"
        assert calibrated.p90 < plain.p90


def test_an_old_file_loads_and_claims_nothing(tmp_path, capsys):
    path = tmp_path / "old.toml"
    path.write_text('name = "old"\nextends = "hgx-a100"\n[calibration.nccl]\nbase = { value = "5 us" }\n')
    text = notes(capsys, "all_reduce", "--topology", path, "--size", "1G")
    assert NOT_RECORDED in text
    assert "how the log was started that the constants are fitted to is not recorded" in text
    assert "with numbers of the machine" not in text


def test_constants_of_other_libraries_say_nothing_of_nccl():
    plain = fabrics.load("hgx-a100")
    other = replace(plain, calibration=Calibration(device={"stream": Constant(0.9, 0.8, 1.0)}))
    assert of_collective(other, 2.0**30) == of_collective(plain, 2.0**30)


@pytest.mark.parametrize(("nbytes", "known"), [(2.0**30, True), (8.0, False)])
def test_a_measured_number_tells_of_its_class_of_sizes(nbytes, known, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nextends = "hgx-a100"\n[measured]\nall_reduce = [{size = "1 GiB", time = "8 ms"}]\n')
    around = of_collective(fitting.load(str(path)), nbytes)
    assert (around.known == "calibrated") is known
    assert around.outside == ("" if known else "none of the measured numbers is of <=64 KiB")


def test_a_number_that_is_kept_apart_tells_of_nothing(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nextends = "hgx-a100"\n[measured]\nall_reduce = [{size = "1 GiB", time = "8 us"}]\n')
    with pytest.warns(fitting.NumberKeptApart):
        machine = fitting.load(str(path))
    assert of_collective(machine, 2.0**30).known != "calibrated"


def test_a_collective_is_started_as_the_log_was(of_large_rows, capsys):
    text = notes(capsys, "all_reduce", "--topology", of_large_rows, "--size", "8")
    assert "played as the log of the calibration was started: single_process" in text
    assert "the log does not say its NCCL: NCCL 2.14 is assumed, as the fit did" in text
    times = {}
    for launch in ("", "single_process", "process_per_gpu"):
        more = ("--launch", launch) if launch else ()
        assert run("collective", "all_reduce", "--topology", of_large_rows, "--size", "8", "--json", *more) == 0
        times[launch] = json.loads(capsys.readouterr().out)["rows"][0]["time_us"]
    assert times[""] == times["single_process"] > times["process_per_gpu"]
    text = notes(capsys, "all_reduce", "--topology", of_large_rows, "--size", "8", "--launch", "threads")
    assert "played: threads, NCCL 2.14; " in text
    assert "the constants are of a log of another launch, single_process" in text


def test_small_messages_of_another_launch_were_not_measured():
    mine = machine_of(replace_span(smallest=8.0))
    for launch, nbytes, words in (
        ("single_process", 8.0, ""),
        ("process_per_gpu", 8.0, "no small all_reduce of a job started as process_per_gpu was in the log"),
        ("process_per_gpu", 2.0**30, ""),
    ):
        assert of_collective(mine, nbytes, 1, launch=launch).outside == words


def test_options_win_over_the_log_and_what_nobody_says_is_said():
    mine = machine_of(SPAN)
    start = started_as_measured(mine, "all_reduce", 1)
    assert (start.launch, start.version) == ("single_process", (2, 26))
    assert start.words == "played as the log of the calibration was started: single_process, NCCL 2.26"
    start = started_as_measured(mine, "all_reduce", 1, "threads", (2, 20))
    assert (start.launch, start.version) == ("threads", (2, 20))
    assert "of a log of NCCL 2.26" in start.words
    silent = machine_of(replace_span(launch="", version=None))
    start = started_as_measured(silent, "all_reduce", 1)
    assert "does not say how it was started: process_per_gpu is assumed" in start.words
    both = machine_of(SPAN, replace_span(launch="process_per_gpu", rows=11))
    start = started_as_measured(both, "all_reduce", 1)
    assert start.launch == "single_process"
    assert "other rows of the log were started as process_per_gpu" in start.words
    assert started_as_measured(fabrics.load("hgx-a100"), "all_reduce", 1).words == ""


def replace_span(**fields: object) -> MeasuredSpan:
    return MeasuredSpan(**{name: getattr(SPAN, name) for name in SPAN.__struct_fields__} | fields)


def test_a_file_gives_back_its_spans(tmp_path):
    spans = (SPAN, replace_span(kind="sendrecv", smallest=33553920.0, launch="", version=None))
    part = Calibration(nccl=NCCL, provenance=Provenance(rows=24, spans=spans))
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nextends = "hgx-a100"\n' + fabrics.calibration_text(part))
    loaded = fabrics.load(str(path)).calibration
    assert loaded is not None
    assert loaded.provenance.spans == spans
    over = tmp_path / "over.toml"
    over.write_text('name = "over"\nextends = "mine.toml"\n[calibration.nccl]\nbase = { value = "5 us" }\n')
    above = fabrics.load(str(over)).calibration
    assert above is not None
    assert above.provenance.spans == ()  # of which rows this constant is nobody says


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ('smallest = "4 MB/s"', "spans[0].smallest"),
        ('smallest = "9 GiB"', "the smallest comes first"),
        ('collective = "all_redcue"', "calibration.spans[0].collective"),
        ("ranks = 1", "calibration.spans[0].ranks"),
        ('launch = "g8"', "calibration.spans[0].launch"),
        ('nccl = "new"', "calibration.spans[0].nccl"),
    ],
)
def test_a_mistake_in_a_span_is_one_clear_error(field, says, tmp_path):
    right = {"collective": '"all_reduce"', "nodes": "1", "ranks": "8", "smallest": '"4 MiB"', "largest": '"8 GiB"'}
    name, value = field.split(" = ")
    text = ", ".join(f"{key} = {text}" for key, text in (right | {"rows": "3", name: value}).items())
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\nextends = "hgx-a100"\n[calibration]\nspans = [{{ {text} }}]\n')
    with pytest.raises(TopologyError) as caught:
        fabrics.load(str(path))
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_calibrate_says_what_the_log_has_and_has_not(tmp_path, capsys):
    data = published(tmp_path / "large.csv", "microsoft/superbenchmark", "all_reduce", 2.0**22)
    assert run("calibrate", data, "--topology", "hgx-a100", "-o", tmp_path / "mine.toml") == 0
    printed = capsys.readouterr().out
    assert "measured: all_reduce of 4 MiB to 8 GiB over 1 node, 8 ranks: 12 rows (single_process)" in printed
    assert "not measured: all_gather, reduce_scatter, " in printed
    assert "; sizes below 4 MiB (all_reduce); several nodes. Sizes that a collective" in printed


def test_what_a_whole_log_has_not():
    whole = [replace_span(smallest=8.0, nodes=nodes, ranks=8 * nodes) for nodes in (1, 4)]
    assert list(missing_words(whole))[1:] == ["more than 4 nodes", "2 to 3 nodes"]
    apart = [replace_span(smallest=8.0, largest=2.0**16, nodes=2), replace_span(smallest=2.0**30, nodes=2)]
    assert list(missing_words(apart))[1:] == [
        "sizes between 64 KiB and 1 GiB (all_reduce)",
        "more than 2 nodes",
        "fewer than 2 nodes",
    ]


def test_what_is_off_says_before_and_after_the_fit(tmp_path, capsys):
    """A log that takes 1.5 times as long at every size, which a constant mends and no structure explains."""
    lines = ["case_id,topology,nodes,ranks,collective,size_bytes,time_us,busbw_GBps"]
    for power in range(20, 34):
        time = 1.5 * of_shipped(2.0**power)
        lines.append(f"a,dgx-a100,1,8,all_gather,{2**power},{time * 1e6:.3f},0")
    data = tmp_path / "slow.csv"
    data.write_text("\n".join(lines) + "\n")
    assert run("calibrate", data, "--topology", "dgx-a100", "-o", tmp_path / "mine.toml") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(">32 MiB: before the fit off"))
    assert "off by 33% in the median (after it by " in line


def of_shipped(nbytes: float) -> float:
    from clustersim import collectives
    from clustersim.collectives.base import Group, Request

    machine = fabrics.load("dgx-a100")
    group = Group(machine, machine.gpus, "process_per_gpu", (2, 14))
    return collectives.plan(Request("all_gather", nbytes), group, "nccl").time(machine.link_bandwidth)


def test_a_run_says_that_its_launch_and_its_collectives_are_not_the_logs(of_large_rows):
    prepared = load("ddp_gpt2_xl_2x8_a100", {"cluster.topology": str(of_large_rows)}).prepare()
    text = "\n".join(prepared.notes)
    assert "of a log of another launch (single_process); this run plays process_per_gpu" in text
    assert "all_reduce between nodes was not in the log" in text
    shipped = load("ddp_gpt2_xl_2x8_a100", {"cluster.topology": "hgx-a100"}).prepare()
    assert "calibration" not in "\n".join(shipped.notes)


def test_a_plan_takes_links_inside_a_node_and_a_network_as_collective_does():
    mine = machine_of(SPAN, nodes=4)
    numbers = {number.name: number for number in uncertain(mine, "bf16")}
    for name, nodes in (("inside", 1), ("network", 4)):
        around = of_collective(mine, LARGE, nodes)
        assert numbers[name].low == pytest.approx(1 / (1 + around.p90))
        assert numbers[name].outside == around.outside
    assert numbers["network"].outside == "all_reduce between nodes was not in the log"
    assert not numbers["inside"].outside


def test_a_robust_choice_takes_kernels_as_widely_as_a_step_on_that_gpu_is_known():
    """Kernels of a B300, of whose generation few steps are published, had the range of an H100's."""
    widths = {}
    for name, dtype in (("hgx-h100", "bf16"), ("hgx-b300", "bf16"), ("hgx-b300", "fp8")):
        machine = fabrics.load(name, nodes=2)
        (kernels,) = [number for number in uncertain(machine, dtype) if number.name == "kernels"]
        around = trust_in("single", machine.node_types[0].gpu, dtype)
        assert kernels.low == pytest.approx(1 / (1 + around.p90))
        assert kernels.high == pytest.approx(1 / (1 - around.p90))
        widths[name, dtype] = around.p90
    assert widths["hgx-h100", "bf16"] < widths["hgx-b300", "bf16"] < widths["hgx-b300", "fp8"]


HELD_OUT = (
    "microsoft/superbenchmark hgx-a100 reduce_scatter",
    "NVIDIA/nccl-tests",
    "dstackai/dstack hgx-b200",
    "zarzen/nccl-tests",
)
"""Logs of one node and of several, of which the last tells what is not known without it."""


def parted(whole: LogPlays, is_fitted: Callable[[Sample], bool]) -> tuple[LogPlays, LogPlays]:
    """Rows that are fitted, and the others."""
    rows = whole.samples.rows
    parts = ([row for row in rows if is_fitted(row)], [row for row in rows if not is_fitted(row)])
    fitted, rest = (replace(whole, samples=replace(whole.samples, rows=tuple(part))) for part in parts)
    return fitted, rest


def test_what_is_claimed_holds_of_rows_that_were_left_out():
    """Sizes between those fitted, sizes far beyond them, and more nodes: each range holds nine in ten of its rows."""
    shares: dict[bool, list[bool]] = {True: [], False: []}
    reasons = set()
    for key, samples in logs(TABLE).items():
        if not any(name in " ".join(key) for name in HELD_OUT):
            continue
        whole = LogPlays(samples, key[1])
        nodes = min(row.nodes for row in samples.rows)
        splits = [
            whole.halves(),
            parted(whole, lambda row: row.nbytes >= 2.0**22),
            parted(whole, lambda row, nodes=nodes: row.nodes == nodes),
        ]
        for fitted, rest in splits:
            for row in claimed_rows(fitted, rest):
                shares[bool(row.outside)].append(row.most)
                reasons.add(row.outside)
    assert any("over 4 nodes" in reason for reason in reasons)
    assert any("sizes below" in reason for reason in reasons)
    for held in shares.values():
        assert len(held) > 40
        assert sum(held) >= 0.88 * len(held)
