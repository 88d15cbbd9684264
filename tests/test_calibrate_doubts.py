"""A calibrated file predicts its own log as was said of it, at any number of nodes; what a log leaves open is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

import clustersim
from clustersim.app.cli import main
from clustersim.calibrate.beside_machine import beside_machine, lines
from clustersim.calibrate.fit.of_logs import LogPlays, nccl_times
from clustersim.calibrate.fit.structures import Structure, explained, tried_words
from clustersim.calibrate.fit.untold import contradictions, taken_for_granted
from clustersim.cluster import files as fabrics
from clustersim.cluster.files import Change
from clustersim.collectives.base import Group, Request
from clustersim.collectives.nccl_why import why
from clustersim.core.errors import TraceError
from clustersim.files import traces
from clustersim.files.traces.samples import Sample, Samples
from tests.evidence.calibrations import logs

KEY = ("hgx-h100", "all_reduce")
TABLE = ROOT / "tests" / "data" / "measurements" / "nccl_tests.csv.gz"


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(a) for a in arguments])
    return int(done.value.code or 0)


def written(rows: list[tuple[int, float]], path: Path, head: str = "") -> Path:
    """(bytes, seconds) of an all_reduce of 16 ranks as nccl-tests prints them."""
    timed = ["time", "algbw", "busbw", "#wrong"]
    columns = ["size", "count", "type", "redop", "root", *timed, *timed]
    lines = [head, f"# {' '.join(columns)}"] if head else []
    for size, seconds in rows:
        rate = size / seconds / 1e9
        cells = f"{seconds * 1e6:.2f} {rate:.2f} {rate * 15 / 8:.2f} 0"
        lines.append(f"{size} {size // 4} float sum -1 {cells} {cells}")
    path.write_text("\n".join(lines) + "\n")
    return path


def published() -> list[Sample]:
    """All-reduces of two 8-GPU H100 machines, as somebody published them, from 1 KiB."""
    samples = next(log for key, log in logs(TABLE).items() if key == ("github.com/NVIDIA/nccl-tests", *KEY))
    return [row for row in samples.rows if row.nodes == 2 and row.nbytes >= 1024]


def gathered(nodes: int) -> tuple[Sample, ...]:
    """All-gathers of 8 GPUs a node, 1 MiB to 512 MiB."""
    sizes = [float(1 << i) for i in range(20, 30)]
    return tuple(Sample("all_gather", size, 60e-6 + size / 1e11, ranks=8 * nodes, nodes=nodes) for size in sizes)


HEAD = "\n".join(
    [
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 17179869184 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1",
        *(
            f"#  Rank {i} Group 0 Pid {4000 + i} on node{i // 8} device {i % 8} [0x18] NVIDIA H100 80GB HBM3"
            for i in range(16)
        ),
    ]
)


def test_constants_do_not_undo_what_a_structure_explains_and_the_file_predicts_its_log(tmp_path, capsys):
    """Large messages were 1.9 % off with the slow NIC alone and 19.4 % with constants beside it; and the file could not
    be read for one node, so that the log could not be put beside it."""
    rows = published()
    slow = Structure("slow", changes=(Change("node1/nic0", factor=0.35),))
    described, slowed = (
        nccl_times(Samples(tuple(rows), ""), "hgx-h100", None, structure)[0].predict({}) for structure in (None, slow)
    )
    slower = [(int(row.nbytes), row.seconds * k) for row, k in zip(rows, (slowed / described).tolist(), strict=True)]
    log = written(slower, tmp_path / "slow.log", HEAD)
    out = tmp_path / "mine.toml"
    assert command("calibrate", log, "--topology", "hgx-h100", "-o", out, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert "the slowest NIC at 0.3" in report["explained"]
    assert report["by_size"][">32 MiB"]["after"] < 0.03
    assert all(errors["after"] <= errors["before"] for errors in report["by_size"].values())
    assert command("trace", log, "--topology", out, "--json") == 0
    beside = json.loads(capsys.readouterr().out)
    for name, errors in report["by_size"].items():
        assert beside["errors"][name] == pytest.approx(errors["after"], abs=2e-3)
    (sentence,) = fabrics.load(str(out)).assumed
    assert sentence == "node1/nic0: this cluster has 1 node, the first is node0; nothing is changed there"
    assert not fabrics.load(str(out), nodes=2).assumed


def test_what_a_log_does_not_say_is_told_with_what_is_taken_instead(tmp_path, capsys):
    rows = [(1 << i, 30e-6 + (1 << i) / 2.5e11) for i in range(20, 33)]
    bare = written(rows, tmp_path / "bare.log")
    samples = traces.read(bare)
    assert isinstance(samples, Samples)
    machine = fabrics.load("hgx-h100")
    sentences = list(taken_for_granted(samples, machine))
    assert any("all_reduce of 16 ranks, by its bus bandwidth" in line for line in sentences)
    assert any("16 ranks were on: 2 of 8 GPUs are assumed" in line for line in sentences)
    assert any("how it was started: process_per_gpu is assumed" in line for line in sentences)
    assert any("does not say its NCCL: 2." in line for line in sentences)
    assert any("NCCL_ALGO, NCCL_PROTO): NCCL's own choice is assumed" in line for line in sentences)
    pinned = replace(samples, rows=tuple(replace(row, env="NCCL_PROTO=Simple") for row in samples.rows))
    assert not any("NCCL_PROTO" in line for line in taken_for_granted(pinned, machine))
    assert not any("GPUs are assumed" in line for line in taken_for_granted(samples, machine, 4))
    assert command("calibrate", bare, "--topology", "hgx-h100", "-o", tmp_path / "x.toml") == 0
    assert "note: the log does not say how many nodes its 16 ranks were on: 2 of 8" in capsys.readouterr().out
    assert command("trace", bare, "--topology", "hgx-h100") == 0
    assert "note: the log does not say how many nodes its 16 ranks were on: 2 of 8" in capsys.readouterr().out
    full = traces.read(written(rows, tmp_path / "full.log", HEAD))
    assert isinstance(full, Samples)
    told = list(taken_for_granted(full, machine, 4))
    assert "--nodes 4 is not used: the log itself says 2" in told
    assert not any("how it was started" in line or "GPUs are assumed" in line for line in told)


def test_logs_that_contradict_each_other_are_told(tmp_path):
    rows = [(1 << i, 30e-6 + (1 << i) / 2.5e11) for i in range(20, 33)]
    for factor, count in ((1.05, 0), (1.5, 2)):
        one = written(rows, tmp_path / "one.log", HEAD)
        two = written([(size, factor * seconds) for size, seconds in rows], tmp_path / "two.log", HEAD)
        samples = traces.read([one, two])
        assert isinstance(samples, Samples)
        told = list(contradictions(nccl_times(samples, "hgx-h100")[0].rows))
        assert len(told) == count
        assert all("takes 1.50 times as long in " in line and "two.log as in " in line for line in told)


def test_only_what_was_played_is_said_to_have_been_tried():
    rows = gathered(1)
    alone = LogPlays(Samples(rows, ""), "hgx-a100").described()[0]
    assert tried_words(alone) == "rings alone, Simple alone, both"
    on_two = gathered(2)
    two = LogPlays(Samples(on_two, ""), "hgx-h100").described()[0]
    algorithms = "NVLS off, trees off, rings alone, Simple alone, both"
    assert tried_words(two) == f"{algorithms}, no GPUDirect, fewer, slower and faster NICs, one slow NIC"
    small = LogPlays(Samples(on_two[:5], ""), "hgx-h100").described()[0]
    assert "NIC" not in tried_words(small)


def test_a_file_that_is_named_twice_is_refused(tmp_path, capsys):
    rows = [(1 << i, 30e-6 + (1 << i) / 2.5e11) for i in range(20, 33)]
    log = written(rows, tmp_path / "one.log", HEAD)
    with pytest.raises(TraceError, match=r"one.log: named twice"):
        traces.read([log, log])
    with pytest.raises(TraceError, match=r"one.log: named twice"):
        traces.read([tmp_path, log])
    assert command("calibrate", log, log, "--topology", "hgx-h100", "-o", tmp_path / "x.toml") == 2
    assert "one.log: named twice" in capsys.readouterr().err
    assert not (tmp_path / "x.toml").exists()


def test_a_busy_link_says_of_which_rate_and_a_server_of_which_time(capsys):
    """A NIC that delivers half of its rate was 37.3 % full "of its line rate"; a server's link, of all steps, stood
    beside the same link's share of the steady state."""
    slow = 'cluster.changes=[{match="node0/nic0", factor=0.5}]'
    assert command("run", "ddp_gpt2_xl_2x8_a100", "--set", slow) == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert "node0/nic0 -> leaf0 and others like it, 37.3% of what it delivers, 0.5 of its line rate (" in lines
    assert "node0/nic1 -> leaf1 and others like it, 18.7% of its line rate (" in lines
    assert command("run", "ps_sync_cpu_1x8") == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert "both over the whole run, its first step included" in lines


def test_spans_of_a_rank_that_is_not_there_are_refused():
    """They were none for -1, and an IndexError for 99."""
    timeline = clustersim.load("dp_torch_1x8").run().timeline
    for rank in (-1, 99):
        with pytest.raises(clustersim.ClusterSimError, match=f"no rank {rank}: the run has ranks 0 to"):
            timeline.spans(ranks=[0, rank])


@pytest.mark.parametrize(
    ("publisher", "topology", "explains"),
    [
        # On two and four nodes rings take 9 % longer than NVLSTree, less than the tenth that is notable.
        ("github.com/NVIDIA/nccl-tests", "hgx-h100", False),
        ("github.com/dstackai/dstack", "hgx-b200", True),
    ],
)
def test_a_part_that_is_gone_is_told_where_what_it_costs_is_notable(publisher, topology, explains):
    """Of logs of machines with NVLS off: a published one, as much slower as without it."""
    published_rows = logs(TABLE)[publisher, topology, "all_reduce"]
    off = Structure("off", {"nvls": False})
    plays = [nccl_times(published_rows, topology, None, structure)[0].predict({}) for structure in (None, off)]
    ratios = (plays[1] / plays[0]).tolist()
    rows = tuple(replace(row, seconds=row.seconds * k) for row, k in zip(published_rows.rows, ratios, strict=True))
    log_plays = LogPlays(Samples(rows, ""), topology)
    reason = explained(log_plays.described()[0], log_plays.played)
    words = () if reason is None else (reason.structure.words, *reason.alike)
    assert any("NVLS off" in structure_words for structure_words in words) == explains


@pytest.mark.parametrize(
    ("topology", "named", "is_told"),
    [
        ("hgx-mi300x", "AMD Instinct MI300X", False),
        ("hgx-mi300x", "AMD Instinct MI325X", True),
        ("hgx-mi300x", "NVIDIA A100-SXM4-80GB", True),
        ("hgx-h100", "NVIDIA H100 80GB HBM3", False),
        ("hgx-a100", "NVIDIA A100-SXM4-40GB", False),
        ("hgx-a100", "NVIDIA A100-PCIE-40GB", True),
        ("hgx-h100", "Graphics Device", False),
    ],
)
def test_a_log_of_other_gpus_than_the_machine_s_is_told(topology, named, is_told):
    rows = tuple(replace(row, device=named) for row in gathered(1))
    sentences = taken_for_granted(Samples(rows, "log"), fabrics.load(topology))
    assert any("the log is of another machine" in sentence for sentence in sentences) is is_told


def test_words_on_amd_s_machines_are_of_rccl():
    rows = Samples(tuple(replace(row, launch="process_per_gpu") for row in gathered(1)), "log")
    for topology, library in (("hgx-mi300x", "RCCL"), ("hgx-h100", "NCCL")):
        beside = beside_machine(rows, topology)
        assert f"ratio  {library} runs" in "\n".join(lines(beside))
        assert any(f"the log does not say its {library}: " in doubt for doubt in beside.doubts)
        assert any(f": {library}'s own choice is assumed" in doubt for doubt in beside.doubts)
        group = Group(fabrics.load(topology), fabrics.load(topology).gpus)
        verdicts = {way.verdict for way in why(Request("all_reduce", 2.0**26, "fp32"), group)}
        assert any(verdict.startswith(f"slower by {library}'s estimate") for verdict in verdicts)
