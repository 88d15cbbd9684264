"""An NCCL_DEBUG log ends in a conclusion: what is slower than it need be, and why, by what the log itself says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from clustersim.app.cli import cli
from clustersim.files import traces
from clustersim.files.traces.told import NcclLog


def log(lines: list[str], hosts: int = 1, gpus: int = 8, via: str = "P2P/CUMEM/read", between: str = "") -> str:
    """Two channels of a ring over all ranks; ``lines`` are of every rank, before its communicator's."""
    ranks = hosts * gpus
    text = "host0:1:2 [0] NCCL INFO NCCL version 2.21.5+cuda12.4\n"
    for rank in range(ranks):
        local = f"localRanks {gpus} localRank {rank % gpus} MNNVL 0"
        head = f"host{rank // gpus}:{100 + rank}:{200 + rank} [{rank % gpus}] NCCL INFO "
        after = (rank + 1) % ranks
        inside = after // gpus == rank // gpus
        own = [
            *lines,
            f"comm 0x{rank} rank {rank} nRanks {ranks} nNodes {hosts} {local}",
            *(
                f"Channel 0{c}/0 : {rank}[{rank % gpus}] -> {after}[{after % gpus}] via {via if inside else between}"
                for c in range(2)
            ),
            "16 coll channels, 0 collnet channels, 0 nvls channels, 16 p2p channels, 2 p2p channels per peer",
        ]
        text += "".join(head + line + "\n" for line in own)
    return text


def told(path: Path, text: str) -> NcclLog:
    path.write_text(text)
    read = traces.read(path)
    assert isinstance(read, NcclLog)
    return read


IB = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
GOOD = "NET/IB/0/GDRDMA"
FAR = "GPU Direct RDMA Disabled for GPU 0 / HCA 0 (distance 7 > 4)"
OFI = "NET/OFI Unable to find a protocol that worked. Failed initialization"


@pytest.mark.parametrize(
    ("kind", "words", "lines", "options"),
    [
        ("p2p_off", "NCCL_P2P_DISABLE=1", ["NCCL_P2P_DISABLE set by environment to 1."], {"via": "SHM/direct/direct"}),
        ("p2p_off", "NCCL_P2P_LEVEL=LOC", ["NCCL_P2P_LEVEL set by environment to LOC"], {"via": "SHM/direct/direct"}),
        (
            "p2p_off",
            "GPUs 1 and 0",
            ["P2P is disabled between connected GPUs 1 and 0. You can repress this message"],
            {"via": "SHM/direct/direct"},
        ),
        (
            "p2p_off",
            "though its GPUs have NVLink",
            ["Pattern 4, crossNic 0, nChannels 12, bw 20.0/20.0, type NVL/PIX, sameChannels 1"],
            {"via": "direct shared memory"},
        ),
        ("p2p_off", "the log does not say", [], {"via": "SHM/direct/direct"}),
        ("net_inside", "NCCL_SHM_DISABLE=1", ["NCCL_SHM_DISABLE set by environment to 1."], {"via": GOOD}),
        (
            "gdr_off",
            "nvidia-peermem",
            ["NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"],
            {"hosts": 2, "between": "NET/IB/0"},
        ),
        ("gdr_off", "distance 7, up to 4", [FAR], {"hosts": 2, "between": "NET/IB/0"}),
        (
            "gdr_off",
            "NCCL_NET_GDR_LEVEL=LOC",
            ["NCCL_NET_GDR_LEVEL set by environment to LOC"],
            {"hosts": 2, "between": "NET/IB/0"},
        ),
        ("gdr_off", "the log does not say", [], {"hosts": 2, "between": "NET/IBext/0"}),
        (
            "sockets",
            "mlx5_0:1, mlx5_1:1",
            [IB, "NCCL_NET set by environment to Socket."],
            {"hosts": 2, "between": "NET/Socket/0"},
        ),
        (
            "sockets",
            "NCCL_IB_DISABLE=1",
            ["NCCL_IB_DISABLE set by environment to 1."],
            {"hosts": 2, "between": "NET/Socket/0"},
        ),
        ("sockets", "/dev/infiniband", ["NET/IB : No device found."], {"hosts": 2, "between": "NET/Socket/0"}),
        (
            "sockets",
            "libibverbs.so",
            ["Failed to open libibverbs.so[.1]", "NET/IB : No device found."],
            {"hosts": 2, "between": "NET/Socket/0"},
        ),
        (
            "sockets",
            "libfabric's provider is tcp",
            ["NET/OFI Selected Provider is tcp (found 2 nics)"],
            {"hosts": 2, "between": "NET/Libfabric/0"},
        ),
        (
            "gdr_off",
            "nv_peer_mem module not loaded: load nvidia-peermem",
            ["NET/IB: No GDR support: nv_peer_mem module not loaded", IB],
            {"hosts": 2, "between": "NET/IB/0"},
        ),
        (
            "sockets",
            "the environment forbids P2P or shared memory: NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1",
            ["NCCL_P2P_DISABLE set by environment to 1.", "NCCL_SHM_DISABLE set by environment to 1."],
            {"via": "NET/Socket/0"},
        ),
        ("plugin_failed", "NET/OFI", [OFI], {"hosts": 2, "between": "NET/Socket/0"}),
        (
            "sockets",
            "a plugin failed: NET/OFI aws-ofi-nccl initialization failed; NCCL's own InfiniBand is not tried",
            ["NET/OFI aws-ofi-nccl initialization failed", "NCCL_IB_DISABLE set by environment to 1."],
            {"hosts": 2, "between": "NET/Socket/0"},
        ),
        (
            "sockets",
            "No eligible providers",
            ["NET/OFI No eligible providers were found"],
            {"hosts": 2, "between": "NET/Socket/0"},
        ),
        (
            "sockets",
            "needs its plugin, and none is there: NET/Plugin: Could not find: libnccl-net.so",
            ["NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin."],
            {"hosts": 2, "between": "NET/Socket/0"},
        ),
        (
            "gdr_off",
            "the plugin for EFA says GDR disabled on GDR-supported instance type p4d.24xlarge",
            ["NET/OFI GDR disabled on GDR-supported instance type p4d.24xlarge"],
            {"hosts": 2, "between": "NET/Libfabric/0"},
        ),
        (
            "plugin_failed",
            "NCCL_NET_PLUGIN=aws-ofi",
            ["NCCL_NET_PLUGIN set by environment to aws-ofi", "NET/Plugin: Could not find: libnccl-net-aws-ofi.so"],
            {"hosts": 2, "between": GOOD},
        ),
        (
            "plugin_failed",
            "libfabric.so.1",
            [
                "NET/Plugin : dlerror=libfabric.so.1: cannot open shared object file: No such "
                "file or directory No plugin found (libnccl-net.so), using internal implementation"
            ],
            {"hosts": 2, "between": GOOD},
        ),
        (
            "plugin_failed",
            "GLIBC_2.38",
            ["NET/Plugin: libnccl-net.so: /lib/libc.so.6: version `GLIBC_2.38' not found"],
            {"hosts": 2, "between": GOOD},
        ),
        (
            "plugin_failed",
            "undefined symbol",
            ["TUNER/Plugin: Failed to load libnccl-tuner.so: undefined symbol: foo"],
            {},
        ),
        (
            "plugin_failed",
            "NCCL_NET_PLUGIN=hpcx",
            ["NCCL_NET_PLUGIN set by environment to hpcx", "NET/Plugin: Failed to find ncclNetPlugin symbol (>= v5)."],
            {"hosts": 2, "between": GOOD},
        ),
        ("plugin_failed", "SPCX", ["Failed to initialize NET plugin SPCX"], {"hosts": 2, "between": GOOD}),
        ("far_nic", "8 of 8 GPUs", [], {"hosts": 2, "between": GOOD}),
        (
            "far_nic",
            "another NUMA node",
            ["Pattern 4, crossNic 0, nChannels 2, speed 9.0/9.0, type NVL/SYS, sameChannels 1"],
            {"hosts": 2, "between": GOOD},
        ),
        ("few_channels", "NCCL_MAX_NCHANNELS=16", ["NCCL_MAX_NCHANNELS set by environment to 16."], {}),
        ("nvls_off", "NCCL_NVLS_ENABLE=0", ["NCCL_NVLS_ENABLE set by environment to 0."], {}),
    ],
)
def test_what_a_log_shows_is_its_conclusion_with_the_reason(tmp_path: Path, kind, words, lines, options):
    text = log(lines, **options)
    if words == "8 of 8 GPUs":
        paths = "".join(
            f"host0:1:2 [0] NCCL INFO GPU/{gpu}000 :GPU/{gpu}000 (0/5000.000000/LOC) CPU/0 (1/12.000000/PHB) "
            f"NET/0 (3/9.000000/SYS) NET/1 (3/9.000000/SYS) \n"
            for gpu in range(8)
        )
        text = paths + text
    read = told(tmp_path / "nccl.log", text)
    causes = [cause for cause in read.causes if cause.kind == kind]
    assert len(causes) == 1, read.lines
    assert words in f"{causes[0].text} {causes[0].why}"
    assert any(line.startswith("conclusion: ") and causes[0].text in line for line in read.lines)


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        ([], {}),
        ([IB, "GPU Direct RDMA Enabled for HCA 0 'mlx5_0'"], {"hosts": 2, "between": GOOD}),
        (
            ["NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.", IB],
            {"hosts": 2, "between": GOOD},
        ),
        (["NCCL_P2P_DISABLE set by environment to 0."], {}),
        (
            [
                "NCCL_NET_PLUGIN set by environment to hpcx",
                "NET/Plugin: Failed to find ncclNetPlugin_v8 symbol.",
                "NET/Plugin: Loaded net plugin NCCL RDMA Plugin v7 (v7)",
                "NET/Plugin: Failed to find ncclCollNetPlugin_v8 symbol.",
                "Using network IBext_v7",
            ],
            {"hosts": 2, "between": "NET/IBext_v7/0/GDRDMA"},
        ),
        (
            [
                "NET/Plugin: Failed to find ncclNetPlugin symbol (>= v5). ncclNetPlugin symbols v4 and lower are not "
                "supported.",
                "TUNER/Plugin: Failed to find ncclTunerPlugin_v3 symbol, using internal tuner instead.",
                IB,
            ],
            {"hosts": 2, "between": GOOD},
        ),
        (
            [
                "NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or directory No "
                "plugin found (libnccl-net.so), using internal implementation",
                IB,
            ],
            {"hosts": 2, "between": GOOD},
        ),
        (["NET/IB : No device found.", "Failed to initialize NET plugin IB", "Using network Socket"], {}),
    ],
)
def test_a_log_of_a_run_at_its_best_blames_nothing(tmp_path: Path, lines, options):
    read = told(tmp_path / "nccl.log", log(lines, **options))
    assert read.causes == []
    assert read.lines[-1] == "conclusion: nothing here says that a transport is slower than it need be"


def test_a_log_without_a_line_of_its_transports_approves_none(tmp_path: Path):
    end = "host0:1:2 [0] NCCL INFO comm 0x5 rank 0 nranks 16 cudaDev 0 busId 100000 - Destroy COMPLETE\n"
    read = told(tmp_path / "nccl.log", end)
    assert (read.ranks, read.causes) == (16, [])
    assert read.lines[-1].startswith("conclusion: none; no line here tells what transports are used")


def test_a_log_that_ends_before_its_communicator_says_what_it_warns_of(tmp_path: Path):
    lines = "host0:1:2 [0] NCCL INFO NCCL version 2.26.2+cuda12.6\n"
    warning = "[2025-06-12 16:57:52] host0:1:3 [0] misc/nvmlwrap.cc:74 NCCL WARN Failed to open libnvidia-ml.so.1\n"
    read = told(tmp_path / "nccl.log", lines + warning)
    assert (read.ranks, [cause.kind for cause in read.causes]) == (0, ["warned"])
    assert "the driver's library of management could not be used" in read.lines[-1]


def test_of_a_named_machine_nvlink_and_channels_are_expected(tmp_path: Path):
    path = tmp_path / "nccl.log"
    text = log(["NCCL_P2P_DISABLE set by environment to 1."], via="SHM/direct/direct")
    path.write_text(text.replace("16 coll", "2 coll"))
    done = CliRunner().invoke(cli, ["trace", str(path), "--topology", "hgx-a100", "--json"])
    causes = {cause["kind"]: cause for cause in json.loads(done.stdout)["causes"]}
    assert "where hgx-a100 has NVLink" in causes["slower_than_machine"]["text"]
    assert "2 channels, and up to" in causes["few_channels"]["text"]
    shown = CliRunner().invoke(cli, ["trace", str(path), "--topology", "hgx-a100"]).output
    assert "0 of 0" not in shown
    assert "conclusion" in shown.splitlines()[-1]


def test_nodes_are_told_whichever_line_names_them(tmp_path: Path):
    first = "host0:1:2 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 16 cudaDev 0 busId 1000 - Init START\n"
    assert told(tmp_path / "a", first + log([], hosts=2, between=GOOD)).nodes == 2


def test_machines_that_nvlink_joins_are_still_two(tmp_path: Path):
    text = log([], hosts=2, between="P2P/MNNVL").replace("nNodes 2 localRanks 8", "nNodes 1 localRanks 16")
    assert told(tmp_path / "a", text).nodes == 2
    bare = log([], hosts=2, between=GOOD).replace(" nNodes 2 localRanks 8", "")
    assert told(tmp_path / "b", bare).nodes == 2


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", "worker-0: ", "2024-07-18T15:41:05.1Z stdout F ", "[default0]:"])
def test_prefixes_hide_no_host_and_no_cause(tmp_path: Path, prefix: str):
    text = log(["NCCL_IB_DISABLE set by environment to 1."], hosts=2, between="NET/Socket/0")
    read = told(tmp_path / "a", "".join(prefix + line for line in text.splitlines(keepends=True)))
    assert (read.ranks, read.nodes) == (16, 2)
    assert [cause.kind for cause in read.causes] == ["sockets"]


def test_ranks_of_several_communicators_are_not_mixed_up(tmp_path: Path):
    """Ranks 0 and 1 of a data-parallel group are ranks 0 and 8 of the job: their channel leaves the machine."""
    text = log([], hosts=2, between=GOOD)
    for rank in (0, 8):
        head = f"host{rank // 8}:{100 + rank}:{200 + rank} [0] NCCL INFO "
        text += f"{head}comm 0x9{rank} rank {rank // 8} nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0\n"
        text += f"{head}Channel 00/0 : {rank // 8}[0] -> {1 - rank // 8}[0] [send] via {GOOD}\n"
    read = told(tmp_path / "a", text)
    assert read.causes == []
    assert (read.ranks, read.nodes) == (16, 2)


def test_a_log_that_names_no_node_fills_those_of_the_machine(tmp_path: Path):
    path = tmp_path / "nccl.log"
    path.write_text(
        "h:1:2 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 16 cudaDev 0 busId 1000 - Init START\n"
    )
    done = CliRunner().invoke(cli, ["trace", str(path), "--topology", "hgx-a100"])
    assert done.exit_code == 0, done.exception
    assert "taken as 2 x hgx-a100" in done.output


def test_rccls_version_is_told(tmp_path: Path):
    text = log([]).replace("NCCL version 2.21.5+cuda12.4", "RCCL version 2.22.3+hip6.4")
    assert told(tmp_path / "a", text).versions == ["2.22.3"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Call to ibv_modify_qp failed with error Connection timed out errno 110", "NCCL_IB_GID_INDEX"),
        ("Error: failed to extend /dev/shm/nccl-ABC to 9637892 bytes", "--shm-size"),
        ("socketStartConnect: Connect to 10.0.0.2<33507> failed : Connection refused", "NCCL_SOCKET_IFNAME"),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "CUDA_VISIBLE_DEVICES"),
        ("something of a later release", "something of a later release"),
    ],
)
def test_what_nccl_warns_of_is_told_once_with_what_to_look_at(tmp_path: Path, line: str, words: str):
    text = log([]) + f"host0:100:200 [0] misc/x.cc:1 NCCL WARN {line}\n" * 2
    (cause,) = [cause for cause in told(tmp_path / "log", text).causes if cause.kind == "warned"]
    assert words in f"{cause.text} {cause.why}"


@pytest.mark.parametrize(("value", "slow"), [("LL", True), ("^Simple,LL128", True), ("LL128", False), ("^LL", False)])
def test_a_protocol_of_small_messages_alone_is_told(tmp_path: Path, value: str, slow: bool):
    read = told(tmp_path / "log", log([f"NCCL_PROTO set by environment to {value}"]))
    assert ("pinned_protocol" in {cause.kind for cause in read.causes}) == slow


def test_fewer_nics_than_a_named_machine_has_are_told(tmp_path: Path):
    path = tmp_path / "log"
    path.write_text(log(["NCCL_IB_HCA set to mlx5_0", IB], hosts=2, between=GOOD))
    words = (
        "host0 uses 2 of the 8 NICs that a node of hgx-h100 has: mlx5_0, mlx5_1; 1 more machine uses fewer, too. "
        "Why: NCCL_IB_HCA=mlx5_0"
    )
    assert words in CliRunner().invoke(cli, ["trace", str(path), "--topology", "hgx-h100"]).output


def test_rings_of_before_28_are_channels(tmp_path: Path):
    text = "".join(
        f"h:1:2 [{rank}] NCCL INFO {line}\n"
        for rank, line in (
            (3, "Ring 00 : 3[3] -> 2[2] via P2P/IPC"),
            (7, "Ring 00 : 15 -> 0 [send] via NET/Socket/0"),
            (0, "Ring 00 : 7 -> 8 [receive] via NET/Socket/0"),
            (1, "Ring 00 : 4[0] -> 5[1] via direct shared memory"),
            (1, "comm 0x7fa5380022f0 rank 5 nranks 16 cudaDev 1 nvmlDev 1 - Init COMPLETE"),
        )
    )
    read = told(tmp_path / "log", text)
    assert read.transports == {"P2P/IPC": 1, "NET/Socket": 2, "direct shared memory": 1}
    assert any("TCP sockets carry" in line for line in read.lines)


# ---- among a benchmark's rows ----------------------------------------------------------------------------------------

HEAD = "# nThread 1 nGpus 1 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 graph: 0\n"
COLUMNS = "#       size         count      type   redop    root     time   algbw   busbw #wrong\n"


def benchmark(busbw: float) -> str:
    """nccl-tests on two machines with NCCL's own lines between its head and its rows: 16 ranks, GPUDirect off."""
    ranks = "".join(
        f"#  Rank {r} Group  0 Pid 1 on host{r // 8} device {r % 8} [0x{r}] NVIDIA H100\n" for r in range(16)
    )
    size, micros = 1 << 30, (1 << 30) * 1.875 / busbw / 1e3
    row = f"{size} {size // 4} float sum -1 {micros:.1f} {busbw / 1.875:.2f} {busbw:.2f} 0\n"
    return HEAD + ranks + log([IB], hosts=2, between="NET/IB/0") + COLUMNS + row


def test_what_nccl_says_between_a_benchmarks_rows_stands_below_them(tmp_path: Path):
    """The rows alone were "explained by 1 of 8 NICs a node", where the log itself said that GPUDirect is off."""
    path = tmp_path / "bench.log"
    path.write_text(benchmark(90.0))
    plain = CliRunner().invoke(cli, ["trace", str(path)]).stdout
    assert "1 measured collectives" in plain
    assert "conclusion: GPUDirect RDMA is off" in plain
    beside = CliRunner().invoke(cli, ["trace", str(path), "--topology", "hgx-h100"]).stdout
    assert "expected on hgx-h100" in beside
    assert beside.index("conclusion: GPUDirect RDMA is off") > beside.index("median |error|")
    document = json.loads(CliRunner().invoke(cli, ["trace", str(path), "--json"]).stdout)
    assert [cause["kind"] for cause in document["nccl"][0]["causes"]] == ["gdr_off"]


def test_rows_that_cannot_be_taken_are_told_where_another_reader_takes_the_log(tmp_path: Path):
    """Of a log whose rows fit no collective, NCCL's lines were told as if there were no table."""
    told_log = told(tmp_path / "bench.log", benchmark(90.0).replace(" 90.00 0", " 91.50 0"))
    assert list(told_log.skipped.values()) == [1]
    assert "collective" in next(iter(told_log.skipped))


def test_all_machines_with_fewer_nics_are_counted(tmp_path: Path):
    (tmp_path / "nccl.log").write_text(log([IB], hosts=3, between=GOOD))
    done = CliRunner().invoke(cli, ["trace", str(tmp_path / "nccl.log"), "--topology", "hgx-h100"])
    assert "host0 uses 2 of the 8 NICs" in done.stdout
    assert "; 2 more machines use fewer, too." in done.stdout


@pytest.mark.parametrize(("topology", "told_off"), [("hgx-h100", True), ("hgx-a100", False)])
def test_no_channels_for_nvls_are_told_of_a_machine_that_would_use_them(tmp_path: Path, topology, told_off):
    (tmp_path / "nccl.log").write_text(log([IB], hosts=2, between=GOOD))
    done = CliRunner().invoke(cli, ["trace", str(tmp_path / "nccl.log"), "--topology", topology])
    assert ("NVLink SHARP (NVLS) has no channels" in done.stdout) is told_off


# ---- logs that were cut, joined or quoted on their way --------------------------------------------------------------


def test_a_log_without_a_communicator_tells_which_network_was_chosen(tmp_path: Path) -> None:
    """It was refused, though it says what leaves the machine and why."""
    text = "n0:9:9 [0] NCCL INFO NET/IB : No device found.\nn0:9:9 [0] NCCL INFO Using network Socket\n"
    (cause,) = told(tmp_path / "a.log", text).causes
    assert cause.kind == "sockets"
    assert "no InfiniBand device" in cause.why


def test_lines_of_several_ranks_in_one_are_taken_apart(tmp_path: Path) -> None:
    """Their ends are lost where a page or a terminal's copy joins them: one of three was counted."""
    lines = [
        f"vm{host}:7:{8 + host} [1] NCCL INFO Channel 0{host}/0 : 1[1] -> 9[1] [send] via {GOOD}" for host in range(3)
    ]
    for between in (" ", " " * 30, ""):
        assert told(tmp_path / "a.log", between.join(lines) + "\n").transports == {"NET/IB": 3}


@pytest.mark.parametrize("order", [1, -1])
def test_lines_without_a_host_are_nccls_among_traces_too(tmp_path: Path, order: int) -> None:
    channels = [f"NCCL INFO Channel 0{channel}/0 : 0[3f000] -> 1[40000] via P2P/IPC" for channel in range(2)]
    lines = ["715305.603265 setupChannel:458 NCCL TRACE rank 0 nranks 2", *channels][::order]
    assert told(tmp_path / "a.log", "\n".join(lines) + "\n").transports == {"P2P/IPC": 2}


def _sent(host: str, pid: int, source: str, target: str, way: str = "send") -> str:
    return f"{host}:{pid}:{pid} [0] NCCL INFO Channel 00 : {source} -> {target} [{way}] via NET/Socket/0\n"


def test_who_writes_a_channels_line_tells_on_which_machine_a_rank_is(tmp_path: Path) -> None:
    """Containers that share neither IPC nor /dev/shm; without a communicator's lines it was taken for a way out."""
    text = (
        _sent("a", 1, "0[1b0]", "1[1c0]")
        + _sent("a", 2, "0[1b0]", "1[1c0]", "receive")
        + _sent("b", 1, "2[1b0]", "0[1b0]")
    )
    causes = {cause.kind: cause.text for cause in told(tmp_path / "a.log", text).causes}
    assert causes["net_inside"].startswith("2 channels within a machine")
    assert causes["sockets"].startswith("TCP sockets carry 3 channels")


def test_one_name_of_several_machines_puts_no_ranks_on_one(tmp_path: Path) -> None:
    """Two ranks cannot have one GPU: the name stands for both machines, as where names were taken out of a log."""
    text = "".join(
        _sent("node", rank, f"{rank}[{rank % 2}]", f"{(rank + 1) % 4}[{(rank + 1) % 2}]") for rank in range(4)
    )
    assert {cause.kind for cause in told(tmp_path / "a.log", text).causes} == {"sockets"}


def test_gpudirect_that_the_plugin_for_efa_switches_off_is_told(tmp_path: Path) -> None:
    line = "NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR"
    (cause,) = told(tmp_path / "a.log", log([line], hosts=1, gpus=1)).causes
    assert cause.kind == "gdr_off"
    assert "disabling GDR" in cause.why


def test_a_peer_that_does_not_answer_is_no_plugin_that_failed(tmp_path: Path) -> None:
    line = (
        "n0:9:9 [0] int handle(ctx*, fid*):46 NCCL WARN NET/OFI Request 0x7f45 completed with error. RC: 103. "
        "Error: 4126 (Unresponsive receiver (reachable by EFA device but handshake failed) My EFA addr: x)\n"
    )
    (cause,) = told(tmp_path / "a.log", line).causes
    assert cause.kind == "warned"
    assert "security group" in cause.why
    (other,) = told(
        tmp_path / "b.log", line.replace("Unresponsive receiver", "Overrun").replace("handshake", "it")
    ).causes
    assert "libfabric" in other.text


@pytest.mark.parametrize("other", ["", " [1]mlx5_0:1/RoCE"])
def test_rdma_in_software_is_told_and_no_module_is_asked_for(tmp_path: Path, other: str) -> None:
    lines = [f"NET/IB : Using [0]rxe0:1/RoCE{other} [RO]; OOB eth0:10.0.0.1<0>", "Using network IB"]
    lines += ["NET/IB : GPU Direct RDMA Disabled for HCA 0 'rxe0'"]
    kinds = [cause.kind for cause in told(tmp_path / "a.log", log(lines, hosts=1, gpus=1)).causes]
    assert kinds == ["soft_rdma"] + ["gdr_off"] * bool(other)


def test_tcp_has_no_gpudirect_that_could_be_off(tmp_path: Path) -> None:
    """It was nvidia-peermem that should be loaded for a network of sockets."""
    lines = ["NET/Socket : Using [0]lo:127.0.0.1<0>", "Using network Socket"]
    lines += ["NET/Socket : GPU Direct RDMA Disabled for HCA 0 'lo'"]
    kinds = [cause.kind for cause in told(tmp_path / "a.log", log(lines, hosts=1, gpus=1)).causes]
    assert "gdr_off" not in kinds
