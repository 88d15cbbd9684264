"""Logs that are neither a run nor a benchmark tell what they know; what a hang waits for is found."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import clustersim
from clustersim.app.cli import cli
from clustersim.core.errors import ClusterSimError, TraceError
from clustersim.files import traces
from clustersim.files.traces import Samples, Told

DUMPS = Path(__file__).parent / "data" / "flight_recorder"
"""Recorded with torch 2.13 and Gloo: three ranks all-reduced three times, then rank 2 did not call the fourth."""


@pytest.mark.parametrize("pattern", ["trace_*", "json_*"])
def test_the_rank_that_never_called_is_named_in_recorded_dumps(pattern: str):
    told = traces.read(sorted(DUMPS.glob(pattern)))
    assert isinstance(told, Told)
    (fault,) = told.faults
    assert (fault.seq, fault.missing, fault.waiting) == (4, [2], [0, 1])
    assert told.lines[0].startswith("group '0 default_pg', collective 4, gloo:all_reduce of [[5000]] Float: rank 2")


def dumps(folder: Path, *changes) -> list[Path]:
    """A copy of the recorded dumps, changed rank by rank."""
    paths = []
    for rank, change in enumerate(changes):
        dump = copy.deepcopy(json.loads((DUMPS / f"json_{rank % 2}.json").read_text()))
        change(dump)
        path = folder / f"rank_{rank}"
        path.write_bytes(pickle.dumps(dump))
        paths.append(path)
    return paths


def nothing(dump: dict) -> None:
    """Leave it as it is."""


def ended(dump: dict) -> None:
    for entry in dump["entries"]:
        entry["retired"] = True


def test_ranks_that_called_the_same_are_not_blamed(tmp_path: Path):
    told = traces.read(dumps(tmp_path, ended, ended))
    assert told.faults == []
    assert told.lines[0].startswith("no rank is behind: every group's ranks called the same collectives")
    (fault,) = traces.read(dumps(tmp_path, nothing, nothing)).faults
    assert (fault.cause, fault.missing, fault.look_at) == ("stuck_together", [], [])


def test_ranks_that_called_something_else_are_told_apart(tmp_path: Path):
    def other(dump: dict) -> None:
        dump["entries"][1]["profiling_name"] = "gloo:broadcast"

    told = traces.read(dumps(tmp_path, nothing, other))
    assert told.faults[0].seq == 2
    assert "ranks differ: rank 0: gloo:all_reduce" in told.lines[0]
    assert "rank 1: gloo:broadcast" in told.lines[0]


def test_a_ring_that_forgot_its_oldest_calls_blames_nobody_and_a_lost_dump_is_said(tmp_path: Path):
    def forgot(dump: dict) -> None:
        del dump["entries"][:2]
        ended(dump)

    def of_three(dump: dict) -> None:
        dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
        dump["entries"].pop()

    assert traces.read(dumps(tmp_path, forgot, ended)).faults == []
    told = traces.read(dumps(tmp_path, nothing, of_three))
    assert told.faults[0].missing == [1]
    assert told.lines[0].endswith("rank 0 waits; no dump of rank 2")


def test_a_dump_that_names_code_is_refused_and_nothing_runs(tmp_path: Path):
    ran = tmp_path / "ran"

    class Bad:
        def __reduce__(self):
            return Path.touch, (ran,)

    path = tmp_path / "trace_0"
    path.write_bytes(pickle.dumps({"version": "2.4", "pg_config": {}, "entries": [Bad()]}))
    with pytest.raises(TraceError, match="not a whole Flight Recorder dump: it names"):
        traces.read(path)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("trace_0", b"\x80\x04pg_config", "not a whole"),
        ("trace_x", None, "ends in its rank"),
        ("trace_0", pickle.dumps({"version": "3.0", "pg_config": {}, "entries": []}), "schema '3.0'"),
        ("trace_0", b'{"pg_status": {}, "entries": [', "not a whole"),
    ],
)
def test_a_dump_that_cannot_be_read_is_one_clear_error(tmp_path: Path, name: str, data: bytes | None, said: str):
    (tmp_path / name).write_bytes(data or (DUMPS / "trace_0").read_bytes())
    with pytest.raises(TraceError, match=said):
        traces.read(tmp_path / name)


# ---- NCCL_DEBUG=INFO -------------------------------------------------------------------------------------------------

HOST = "host0:1798:1820 [0] NCCL INFO "
LOG = "".join(
    HOST + line + "\n"
    for line in (
        "NCCL_PROTO set by environment to Simple",
        "comm 0x55a7a339db50 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0",
        "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
        "Channel 01/0 : 15[7] -> 0[0] [receive] via NET/IB/0/GDRDMA",
        "24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer",
        "AllReduce: 8388608 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}",
        "AllReduce: 8388608 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}",
        "AllGather: 4096 Bytes -> Algo 1 proto 0 time 12.5",
    )
)


def test_nccls_log_tells_channels_transports_and_choices(tmp_path: Path):
    path = tmp_path / "nccl.log"
    path.write_text("NCCL version 2.27.3+cuda12.9\n" + LOG)
    told = traces.read(path)
    assert (told.versions, told.ranks, told.nodes) == (["2.27.3"], 16, 2)
    assert told.channels == {"coll": 24, "collnet": 24, "nvls": 16, "p2p": 32}
    assert told.transports == {"P2P/CUMEM": 1, "NET/IB": 1}
    assert told.set == {"NCCL_PROTO": "Simple"}
    assert [msgspec.structs.astuple(row) for row in told.choices] == [
        ("all_gather", 4096, "ring", "LL", 0, 1),
        ("all_reduce", 8388608, "ring", "Simple", 16, 2),
    ]
    done = CliRunner().invoke(cli, ["trace", str(path)])
    assert done.exit_code == 0, done.output
    assert "all_reduce 8 MiB: ring Simple on 16 channels, 2 x" in done.output


def test_nccls_choices_stand_beside_ours(tmp_path: Path):
    path = tmp_path / "nccl.log"
    path.write_text(LOG + HOST + "AllGather: 1073741824 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}\n")
    done = CliRunner().invoke(cli, ["trace", str(path), "--topology", "hgx-h100", "--json"])
    assert done.exit_code == 0, done.output
    rows = {(row["kind"], row["nbytes"]): row for row in json.loads(done.stdout)["choices"]}
    large = rows["all_gather", 1 << 30]
    assert large["same"]
    assert large["ours"] == {"algorithm": "ring", "protocol": "Simple", "channels": large["ours"]["channels"]}
    wrong = CliRunner().invoke(cli, ["trace", str(path), "--topology", "pcie-a100-1gpu-200g"])
    assert isinstance(wrong.exception, TraceError)


def test_nccls_choices_become_pins_of_a_scenario_which_it_then_plays(tmp_path: Path):
    path = tmp_path / "nccl.log"
    scenario = tmp_path / "mine.toml"
    choices = [(1 << 20, "TREE LL128"), (1 << 24, "TREE LL128"), (1 << 28, "RING LL128"), (1 << 29, "NVLS LL")]
    path.write_text(
        LOG
        + "".join(
            f"{HOST}AllReduce: {size} Bytes -> Algo {choice.replace(' ', ' proto ')} channel{{Lo..Hi}}={{0..15}}\n"
            for size, choice in [*choices, (1 << 20, "RING LL"), (1 << 20, "TREE LL128")]
        )
    )
    done = CliRunner().invoke(cli, ["trace", str(path), "--pins"])
    assert done.exit_code == 0, done.output
    scenario.write_text(Path(clustersim.load("ddp_gpt2_xl_2x8_a100").path).read_text() + done.stdout)
    pins = [pin for pin in clustersim.load(scenario).file.run.pins if pin.kind == "all_reduce"]
    assert [(pin.least, pin.most, pin.algorithm, pin.protocol, pin.ranks) for pin in pins] == [
        (1 << 20, 1 << 20, "tree", "LL128", 16),
        (1 << 23, 1 << 23, "ring", "Simple", 16),
        (1 << 24, 1 << 24, "tree", "LL128", 16),
        (1 << 28, 1 << 28, "ring", "LL128", 16),
        (1 << 29, 1 << 29, "nvls", "LL", 16),
    ]
    played = {op.detail["algorithm"] for op in clustersim.load(scenario).run().timeline.ops if op.kind == "all_reduce"}
    pinned = {"run.pins": [{"kind": "all_reduce", "algorithm": "tree", "protocol": "LL128", "least": "1 MiB"}]}
    trees = clustersim.load("ddp_gpt2_xl_2x8_a100", pinned).run().timeline.ops
    assert played == {"ring"}
    assert {
        (op.detail["algorithm"], op.detail["protocol"])
        for op in trees
        if op.nbytes > 1 << 20 and op.kind == "all_reduce"
    } == {("tree", "LL128")}


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ({"algorithm": "rung"}, "'rung'"),
        ({"protocol": "LL12"}, "'LL12'"),
        ({"least": "2 B", "most": "1 B"}, "most must"),
        ({"least": 3}, "bare number"),
        ({"kind": "all_to_all"}, "all_to_all"),
    ],
)
def test_a_pin_that_nccl_cannot_follow_is_one_error_with_its_place(pin, said):
    pins = {"run.pins": [{"kind": "all_reduce", "algorithm": "ring"} | pin]}
    with pytest.raises(ClusterSimError, match=said) as wrong:
        clustersim.load("ddp_gpt2_xl_2x8_a100", pins).prepare()
    assert "$.run.pins" in str(wrong.value)


def test_a_log_without_choices_has_none_to_pin(tmp_path: Path):
    path = tmp_path / "nccl.log"
    path.write_text(HOST + "comm 0x1 rank 0 nRanks 16 nNodes 2\n")
    done = CliRunner().invoke(cli, ["trace", str(path), "--pins"])
    assert "INIT,TUNING" in str(done.exception)


def test_a_log_without_a_communicator_is_refused(tmp_path: Path):
    path = tmp_path / "nccl.log"
    path.write_text(HOST + "Bootstrap: Using eth0\n")
    with pytest.raises(TraceError, match="no communicator in this log"):
        traces.read(path)


# ---- JSON lines ------------------------------------------------------------------------------------------------------


def inspected(rank: int, kind: str, size: int, micros: float, busbw: float, sn: int = 7) -> str:
    return json.dumps(
        {
            "header": {"id": "0x7f8c", "rank": rank, "n_ranks": 8, "nnodes": 1},
            "metadata": {"inspector_output_format_version": "v4.0", "hostname": "h"},
            "coll_perf": {
                "coll": kind,
                "coll_sn": sn,
                "coll_msg_size_bytes": size,
                "coll_exec_time_us": micros,
                "coll_algobw_gbs": 1.0,
                "coll_busbw_gbs": busbw,
            },
        }
    )


def test_the_inspectors_sizes_are_the_full_tensor_and_the_shortest_rank_counts(tmp_path: Path):
    """Figures of the plugin's own README: 17,179,869,184 bytes all-reduced, and 2,147,483,648 a rank scattered."""
    path = tmp_path / "inspector.log"
    lines = [
        inspected(2, "AllReduce", 17179869184, 61974, 485.119099),
        inspected(3, "AllReduce", 17179869184, 62974, 477.4),
        inspected(4, "ReduceScatter", 2147483648, 41057, 366.134533),
        '{"header": {',
    ][:4]
    path.write_text("\n".join(lines) + "\n")
    found = traces.read(path)
    assert isinstance(found, Samples)
    reduced, scattered = found.rows
    assert (reduced.kind, reduced.nbytes, reduced.ranks) == ("all_reduce", 17179869184.0, 8)
    assert reduced.seconds == pytest.approx(61974e-6)
    assert reduced.skew == pytest.approx(1e-3)
    assert scattered.nbytes == 8 * 2147483648.0
    assert scattered.busbw == pytest.approx(366.134533e9, rel=1e-4)
    assert found.skipped == {"a line that is cut off": 1}


def test_rccl_tests_lines_are_samples_out_of_place(tmp_path: Path):
    """A line of ROCm/rccl-tests pull request 93."""
    row = {
        "#wrong": "0",
        "algBw": 0.05337739748698796,
        "busBw": 0.08006609623048194,
        "gpus": 4,
        "inPlace": 0,
        "name": "AllReduce",
        "redop": "sum",
        "size": 1024,
        "time": 19.18415,
        "type": "float",
    }
    path = tmp_path / "rccl.json"
    path.write_text("\n".join(json.dumps(row | {"inPlace": place}) for place in (0, 1)))
    (one,) = traces.read(path).rows
    assert (one.kind, one.nbytes, one.ranks, one.dtype, one.redop) == ("all_reduce", 1024.0, 4, "fp32", "sum")
    assert one.busbw == pytest.approx(0.08006609623048194e9, rel=1e-6)
