"""NCCL's dump of a machine becomes the topology file that describes it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from clustersim.app.cli import cli
from clustersim.cluster import files as fabrics
from clustersim.cluster.files.nccl_xml import topology_text
from clustersim.core.errors import ClusterSimError, TopologyError

SPEED = 'link_speed="32.0 GT/s PCIe" link_width="16"'


def dgx_h100() -> str:
    """As NCCL dumps a DGX H100: a GPU and a NIC on each PCIe switch, 5, 4, 4 and 5 NVLinks to four NVSwitches."""
    lines = ['<system version="1">']
    for socket in range(2):
        lines.append(f'<cpu numaid="{socket}" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">')
        for gpu in range(4 * socket, 4 * socket + 4):
            links = "".join(
                f'<nvlink target="0000:f{5 + s}:00.0" count="{n}" tclass="0x068000"/>'
                for s, n in enumerate((5, 4, 4, 5))
            )
            lines.append(
                f'<pci busid="0000:{gpu}6:00.0" class="0x060400" {SPEED}>'
                f'<pci busid="0000:{gpu}8:00.0" class="0x030200" vendor="0x10de" device="0x2330" {SPEED}>'
                f'<gpu dev="{gpu}" sm="90" rank="{gpu}" gdr="1">{links}</gpu></pci>'
                f'<pci busid="0000:{gpu}9:00.0" class="0x020700" vendor="0x15b3" {SPEED}><nic>'
                f'<net name="mlx5_{gpu}" dev="{gpu}" speed="400000" port="1" gdr="1"/></nic></pci></pci>'
            )
        lines.append("</cpu>")
    return "\n".join([*lines, "</system>"])


def test_a_dump_of_a_dgx_h100_is_the_shipped_machine(tmp_path: Path):
    dump = tmp_path / "dump.xml"
    out = tmp_path / "mine.toml"
    dump.write_text(dgx_h100())
    done = CliRunner().invoke(cli, ["new", "topology", str(out), "--from", str(dump)])
    assert done.exit_code == 0, done.output
    mine, shipped = (fabrics.load(name, nodes=2) for name in (str(out), "hgx-h100"))
    for field in ("device", "n_gpus", "n_nics", "cpu_vendor", "cpu_model", "net", "nvls", "pcie_gen"):
        assert getattr(mine.node_types[0], field) == getattr(shipped.node_types[0], field), field
    for kind in ("nvlink", "pcie", "net"):
        rates = [sorted(np.round(t.link_bandwidth[np.array(t.link_kinds) == kind] / 1e9, 0)) for t in (mine, shipped)]
        assert rates[0] == rates[1], kind


def test_nics_that_nccl_merges_are_no_further_nic(tmp_path: Path):
    """It was a ninth of twice the rate."""
    both = '<nic><net name="mlx5_0+mlx5_1" dev="8" speed="800000" port="1" gdr="1"/></nic></cpu>'
    plain, merged = tmp_path / "plain.xml", tmp_path / "merged.xml"
    plain.write_text(dgx_h100())
    merged.write_text(dgx_h100().replace("</cpu>", both, 1))
    assert topology_text(merged).replace("merged", "plain") == topology_text(plain)
    alone = tmp_path / "alone.xml"  # as it is where the ports themselves are trimmed
    alone.write_text(dgx_h100().replace('name="mlx5_0"', 'name="mlx5_8+mlx5_9"'))
    assert topology_text(alone).count("400 Gb/s") == topology_text(plain).count("400 Gb/s")


def test_direct_nvlinks_are_bundles_between_gpus(tmp_path: Path):
    both = [("0000:08:00.0", "0000:09:00.0"), ("0000:09:00.0", "0000:08:00.0")]
    gpus = "".join(
        f'<pci busid="{own}" class="0x030200" device="0x20b0" link_speed="16.0 GT/s" link_width="16"><gpu sm="80">'
        f'<nvlink target="{other}" count="12" tclass="0x030200"/></gpu></pci>'
        for own, other in both
    )
    path = tmp_path / "two.xml"
    path.write_text(f'<system version="1"><cpu numaid="0" vendor="AuthenticAMD" modelid="49">{gpus}</cpu></system>')
    out = tmp_path / "two.toml"
    out.write_text(topology_text(path))
    made = fabrics.load(str(out))
    nvlinks = np.array(made.link_kinds) == "nvlink"
    assert made.link_bandwidth[nvlinks].tolist() == [300e9, 300e9]
    assert made.node_types[0].cpu_vendor == "amd"


def test_a_rate_of_pcie_that_the_file_does_not_say_is_said_to_be_assumed(tmp_path: Path):
    dump = tmp_path / "dump.xml"
    dump.write_text(dgx_h100())
    assert "of generation 3" not in topology_text(dump)
    dump.write_text(dgx_h100().replace(SPEED, 'link_speed="" link_width="0"'))
    assert "PCIe is of generation 3 with 16 lanes where the file does not say" in topology_text(dump)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<system><cpu/></system>", "no GPU"),
        ("<topology/>", "no GPU"),
        ('<?xml version="1.0"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology version="2.0"/>', "no GPU"),
        ("<machine/>", "holds <machine>"),
        ("Machine (2015GB total)\n  Package L#0\n", "give lstopo --of xml"),
        ('<!DOCTYPE topology SYSTEM "hwloc2.dtd" [<!ENTITY b "c">]><topology/>', "declares a type or entities"),
        ("==== ROCm System Management Interface ====\n", "say --gpu"),
        ("CA 'mlx5_0'\n\tCA type: MT4129\n\tRate: 400\n", "is of ibstat, which does not tell"),
        ("GPU 0: NVIDIA H100\n\t Link 0: 26.562 GB/s\n", "is of nvidia-smi nvlink -s, which"),
        ("<system", "is not XML"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><system/>', "declares a type or entities"),
        (dgx_h100().replace("0x2330", "0xbeef"), "say --gpu"),
        (dgx_h100().replace('count="5"', 'count="many"'), "no number"),
    ],
)
def test_a_dump_that_cannot_be_read_is_one_clear_error(tmp_path: Path, text: str, said: str):
    path = tmp_path / "dump.xml"
    path.write_text(text)
    with pytest.raises(TopologyError, match=said):
        topology_text(path)


def test_a_gpu_whose_id_is_not_known_can_be_named(tmp_path: Path):
    path = tmp_path / "dump.xml"
    out = tmp_path / "mine.toml"
    path.write_text(dgx_h100().replace("0x2330", "0xbeef"))
    done = CliRunner().invoke(cli, ["new", "topology", str(out), "--from", str(path)])
    assert isinstance(done.exception, ClusterSimError)
    done = CliRunner().invoke(cli, ["new", "topology", str(out), "--from", str(path), "--gpu", "H100-SXM5-80GB"])
    assert done.exit_code == 0, done.output
    assert fabrics.load(str(out)).node_types[0].device == "H100-SXM5-80GB"


def matrix(gpus: int, nics: int, nvlink: str) -> str:
    """As `nvidia-smi topo -m` prints a machine of two sockets with a NIC beside every GPU."""
    names = [*(f"GPU{i}" for i in range(gpus)), *(f"NIC{i}" for i in range(nics))]
    place = {name: (name[:3], int(name[3:])) for name in names}

    def word(a: str, b: str) -> str:
        (kind, i), (other, j) = place[a], place[b]
        if a == b:
            return " X "
        if kind == other == "GPU" and nvlink:
            return nvlink
        if i == j:
            return "PIX"
        return "NODE" if (i < gpus // 2) == (j < gpus // 2) else "SYS"

    rows = ["\t".join(["", *(f"\x1b[4m{name}" for name in names), "CPU Affinity", "NUMA Affinity\x1b[0m"])]
    for name in names:
        tail = ["0-47", str(int(place[name][1] >= gpus // 2))] if name.startswith("GPU") else []
        rows.append("\t".join([name, *(word(name, other) for other in names), *tail]))
    return "\n".join([*rows, "", "Legend:", "", "  X    = Self", "NIC Legend:", "", "  NIC0: mlx5_0", ""])


def test_a_matrix_of_nvidia_smi_is_the_machine_that_nccl_dumps_but_for_its_rates(tmp_path: Path):
    given = tmp_path / "topo.txt"
    out = tmp_path / "mine.toml"
    given.write_text(matrix(8, 8, "NV18"))
    done = CliRunner().invoke(cli, ["new", "topology", str(out), "--from", str(given), "--gpu", "H100-SXM5-80GB"])
    assert done.exit_code == 0, done.output
    assert "nvidia-smi topo -m, topo.txt, rates assumed" in out.read_text()
    mine, shipped = (fabrics.load(name, nodes=2) for name in (str(out), "hgx-h100"))
    for field in ("device", "n_gpus", "n_nics", "net", "nvls", "pcie_gen"):
        assert getattr(mine.node_types[0], field) == getattr(shipped.node_types[0], field), field
    sums = [
        t.link_bandwidth[(t.link_src == t.node_gpus(0)[0]) & (np.array(t.link_kinds) == "nvlink")].sum()
        for t in (mine, shipped)
    ]
    assert sums[0] == pytest.approx(sums[1])
    pcie = [sum(kind == "pcie" for kind in t.link_kinds) for t in (mine, shipped)]
    assert pcie[0] == pcie[1]


def test_gpus_of_a_matrix_with_fewer_links_than_they_have_are_joined_directly_or_not_at_all(tmp_path: Path):
    for name, word, kinds in (("bridge", "NV4", 2), ("none", "", 0)):
        given = tmp_path / f"{name}.txt"
        out = tmp_path / f"{name}.toml"
        given.write_text(matrix(2, 0, word))
        out.write_text(topology_text(given, "A100-PCIe-80GB"))
        made = fabrics.load(str(out), nodes=1)
        assert sum(kind == "nvlink" for kind in made.link_kinds) == kinds
        assert "nvswitch" not in made.vertex_kinds


def test_a_matrix_without_its_gpu_or_with_a_row_cut_off_is_one_error(tmp_path: Path):
    given = tmp_path / "topo.txt"
    given.write_text(matrix(4, 2, "NV12"))
    with pytest.raises(TopologyError, match="say --gpu"):
        topology_text(given)
    given.write_text(matrix(4, 2, "NV12").replace("NIC1\tNODE", "NIC1\t?"))
    with pytest.raises(TopologyError, match="row NIC1 is not whole"):
        topology_text(given, "A100-SXM4-40GB")


def tree(gpu: str = "", nic: str = "", gpus: int = 8, *, link: str = 'link_speed="16 GT/s" link_width="16"') -> str:
    """As files for NCCL_TOPO_FILE are: PCI devices alone, two GPUs and two NICs on a switch."""
    lines = ['<system version="1">']
    for switch in range(gpus // 2):
        lines.append(f'<cpu numaid="{switch}" arch="x86_64" vendor="AuthenticAMD"><pci class="0x060400" {link}>')
        for i in range(2):
            lines.append(f'<pci busid="000{switch}:0{i}:00.0" class="0x030200"{gpu} {link}/>')
            lines.append(f'<pci busid="010{switch}:0{i}:00.0" class="0x020700"{nic} {link}/>')
        lines.append("</pci></cpu>")
    return "\n".join([*lines, "</system>"])


def made_of(text: str, folder: Path, *options: str, **asked: str) -> tuple[str, fabrics.TopologyReport, object]:
    """What ``new topology --from`` says, what ``check`` finds, and the machine."""
    given = folder / "given.xml"
    out = folder / "mine.toml"
    given.write_text(text)
    done = CliRunner().invoke(cli, ["new", "topology", str(out), "--from", str(given), *options])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    machine = fabrics.load(str(out), nodes=2)
    return done.output, fabrics.check(machine), machine


def sums(machine, kind: str) -> float:
    """GB/s of links of a kind out of the first GPU, or into the network from a node's NICs."""
    links = np.array(machine.link_kinds) == kind
    if kind == "net":
        nics = np.array([k == "nic" for k in machine.vertex_kinds]) & (machine.vertex_node == 0)
        return float(machine.link_bandwidth[links & nics[machine.link_src]].sum() / 1e9)
    return float(machine.link_bandwidth[links & (machine.link_src == machine.node_gpus(0)[0])].sum() / 1e9)


@pytest.mark.parametrize(
    ("gpu", "nvlink", "net"),
    [
        ("H100-SXM5-80GB", 450, 8 * 50),
        ("A100-SXM4-80GB", 300, 8 * 25),
        ("V100-SXM2-32GB", 150, 8 * 12.5),
        ("H200-SXM5-141GB", 450, 8 * 50),
    ],
)
def test_what_the_pci_tree_leaves_out_is_the_boards_and_said(tmp_path: Path, gpu: str, nvlink: float, net: float):
    lanes = 'link_speed="32 GT/s" link_width="16"' if gpu.startswith("H") else 'link_speed="16 GT/s" link_width="16"'
    said, report, machine = made_of(tree(link=lanes), tmp_path, "--gpu", gpu)
    assert (sums(machine, "nvlink"), sums(machine, "net")) == (pytest.approx(nvlink), pytest.approx(net))
    for words in ("NVLink between the GPUs is that of", "where the file does not say"):
        assert words in said
        assert any(words in warning for warning in report.warnings)


def test_xgmi_is_filled_in_as_well(tmp_path: Path):
    _, report, machine = made_of(tree(), tmp_path, "--gpu", "MI300X")
    assert sums(machine, "xgmi") == pytest.approx(7 * 64)
    assert any("xGMI" in warning for warning in report.warnings)


def test_a_nics_own_id_says_its_rate_before_the_machine_does(tmp_path: Path):
    text = tree(' vendor="0x10de" device="0x2330"', ' vendor="0x15b3" device="0x101b"')
    said, _, machine = made_of(text, tmp_path)
    assert sums(machine, "net") == pytest.approx(8 * 25)
    assert "the fastest port of a ConnectX-6" in said


@pytest.mark.parametrize(("speed", "width", "port"), [("8 GT/s", 16, 100), ("8 GT/s", 8, 50), ("16 GT/s", 16, 200)])
def test_a_nic_is_taken_to_be_no_faster_than_its_slot_carries(tmp_path: Path, speed: str, width: int, port: int):
    text = tree(nic=' vendor="0x15b3" device="0x1021"', link=f'link_speed="{speed}" link_width="{width}"')
    said, _, machine = made_of(text, tmp_path, "--gpu", "H100-SXM5-80GB")
    assert sums(machine, "net") == pytest.approx(8 * port / 8)
    assert f"{port} Gb/s, which is what a slot of" in said
    assert "carries of the fastest port of a ConnectX-7" in said


def test_nics_beside_from_say_the_rate_and_nothing_is_assumed_of_them(tmp_path: Path):
    _, report, machine = made_of(tree(), tmp_path, "--gpu", "H100-SXM5-80GB", "--nics", "8x200Gb/s")
    assert sums(machine, "net") == pytest.approx(8 * 25)
    assert not any("NIC" in warning or "Gb/s" in warning for warning in report.warnings)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ClusterSimError, match="has 8 NICs, 8 of them below a PCIe switch with a GPU; --nics says 4"):
        made_of(tree(), other, "--gpu", "H100-SXM5-80GB", "--nics", "4x200Gb/s")


def test_nics_away_from_gpus_are_left_out_where_fewer_are_said(tmp_path: Path):
    storage = '<pci busid="0300:00:00.0" class="0x020000" link_speed="16 GT/s" link_width="8"/></cpu>'
    text = tree().replace("</cpu>", storage, 1)
    said, _, machine = made_of(text, tmp_path, "--gpu", "H100-SXM5-80GB", "--nics", "8x400Gb/s")
    assert "1 NICs are left out" in said
    assert sums(machine, "net") == pytest.approx(8 * 50)


def test_a_board_that_no_shipped_machine_has_is_asked_for(tmp_path: Path):
    with pytest.raises(TopologyError, match="no shipped machine says how 6 V100-SXM2-32GB are joined by NVLink"):
        made_of(tree(gpus=6), tmp_path, "--gpu", "V100-SXM2-32GB")


def test_a_dump_without_nvlink_is_taken_as_it_is_and_said(tmp_path: Path):
    text = dgx_h100().replace("<nvlink", "<no").replace('tclass="0x068000"/>', "/>")
    _, report, machine = made_of(text, tmp_path)
    assert "nvlink" not in machine.link_kinds
    assert any("is it working?" in warning for warning in report.warnings)


def test_collective_repeats_what_is_assumed(tmp_path: Path):
    made_of(tree(), tmp_path, "--gpu", "H100-SXM5-80GB")
    asked = ["collective", "all_reduce", "--topology", str(tmp_path / "mine.toml"), "--size", "1M"]
    assert "# assumed: NVLink between the GPUs" in CliRunner().invoke(cli, asked).output
    assert '"assumed: NVLink' in CliRunner().invoke(cli, [*asked, "--json"]).output


def test_collective_tells_what_an_assumed_rate_decides(tmp_path: Path):
    made_of(matrix(2, 1, "NV12"), tmp_path, "--gpu", "H100-PCIe-80GB")
    asked = ["collective", "all_reduce", "--topology", str(tmp_path / "mine.toml"), "--nodes", "2", "--size", "64M"]
    lines = CliRunner().invoke(cli, asked).output.splitlines()
    told = next(line for line in lines if "by the rate of the NICs" in line)
    assert all(f"{rate} Gb/s" in told for rate in (100, 200, 400))
    shown = next(line.split() for line in lines if not line.startswith("#"))
    assert f"100 Gb/s {float(shown[7]):.4g} GB/s by {shown[10]}" in told  # which is what was assumed
    assert any("100 Gb/s, the usual port of a server" in line for line in lines)


def test_a_matrix_says_no_rate_of_nics(tmp_path: Path):
    said, report, machine = made_of(matrix(8, 8, "NV18"), tmp_path, "--gpu", "H100-SXM5-80GB")
    assert sums(machine, "net") == pytest.approx(8 * 50)
    assert "400 Gb/s, as in" in said
    assert any("400 Gb/s, as in" in warning for warning in report.warnings)


def test_a_switch_far_slower_than_what_is_below_it_and_an_odd_nic_look_wrong(tmp_path: Path):
    text = dgx_h100().replace(f'class="0x060400" {SPEED}', 'class="0x060400" link_speed="2.5 GT/s" link_width="1"', 1)
    _, report, _ = made_of(text, tmp_path)
    assert any("node0/pcie0" in warning and "0.25 GB/s up" in warning for warning in report.warnings)
    odd = tmp_path / "odd"
    odd.mkdir()
    _, report, _ = made_of(dgx_h100().replace('speed="400000"', 'speed="200000"', 1), odd)
    assert any("nic0 on every node: 25 GB/s beside 7 NICs of 50 GB/s" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[node]\nremove = true", r"remove = true at \$.node.remove: write which vertices"),
        ("[[changes]]\nremove = true", r"changes\[0\]: remove = true: write what is gone"),
        ('[[changes]]\nmatch = "node0/nic0"\nremove = false', "remove = false: write what is gone"),
    ],
)
def test_remove_says_what(tmp_path: Path, text: str, said: str):
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\nextends = "hgx-h100"\n{text}\n')
    with pytest.raises(TopologyError, match=said):
        fabrics.load(str(path))


def test_a_change_of_a_file_may_take_out_what_it_matches(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nextends = "hgx-h100"\n[[changes]]\nmatch = "node0/nic0"\nremove = true\n')
    assert sum(kind == "nic" for kind in fabrics.load(str(path)).vertex_kinds) == 7


def dump(gpus: list[str], *, links: dict[int, str], nic: str = "", device: str = "0x20b5", cpu: str = "") -> str:
    """As NCCL dumps GPUs, one a CPU, with what is inside of each, and something below each CPU."""
    parts = "".join(
        f'<cpu numaid="{i}" arch="x86_64" vendor="AMD"{cpu.format(i // 2)}><pci busid="{bus}" class="0x030200" '
        f'vendor="0x10de" device="{device}" {SPEED}>'
        f'<gpu dev="{i}" sm="80" rank="{i}" gdr="1">{links.get(i, "")}</gpu></pci>{nic}</cpu>'
        for i, bus in enumerate(gpus)
    )
    return f'<system version="1">{parts}</system>'


def nvlink(target: str, kind: str = "0x030200", count: int = 12) -> str:
    """One bundle."""
    return f'<nvlink target="{target}" count="{count}" tclass="{kind}"/>'


PAIR = ["0001:00:00.0", "0002:00:00.0"]


def test_a_link_that_leads_to_its_own_gpu_or_to_none_of_the_file_joins_nothing_and_is_said(tmp_path: Path):
    own, away = tmp_path / "own", tmp_path / "away"
    own.mkdir()
    away.mkdir()
    text = dump(PAIR, links={i: nvlink(bus) for i, bus in enumerate(PAIR)})
    said, report, machine = made_of(text, own)
    assert "nvlink" not in machine.link_kinds
    assert "lead to the GPU itself" in said
    assert any("lead to the GPU itself" in warning for warning in report.warnings)
    others = nvlink("0003:00:00.0", count=4)
    text = dump(PAIR, links={0: nvlink(PAIR[1], count=4) + others, 1: nvlink(PAIR[0], count=4)})
    said, _, machine = made_of(text, away)
    assert sums(machine, "nvlink") == pytest.approx(100)
    assert "0003:00:00.0, which the file does not have" in said


def test_nvlinks_of_a_power9_lead_to_its_cpu(tmp_path: Path):
    text = dump(PAIR, links={i: nvlink("0004:00:01.0", "0x068001", 3) for i in range(2)}, device="0x1db1")
    _, _, machine = made_of(text, tmp_path)
    wires = [
        machine.vertex_kinds[dst]
        for dst, kind in zip(machine.link_dst, machine.link_kinds, strict=True)
        if kind == "nvlink"
    ]
    assert set(wires) == {"cpu", "gpu"}
    assert "nvswitch" not in machine.vertex_kinds


ETHERNET = '<nic><net name="eth0" dev="0" speed="10000" port="0" guid="0x0" gdr="0"/></nic>'


def test_an_interface_below_every_cpu_is_one_nic_of_sockets(tmp_path: Path):
    _, _, machine = made_of(dump(PAIR, links={}, nic=ETHERNET, device="0x20b5"), tmp_path)
    assert (machine.node_types[0].n_nics, machine.node_types[0].net) == (1, "tcp")


@pytest.mark.parametrize(
    ("old", "new", "net"),
    [
        ("mlx5_", "mlx5_", "ib"),
        ('class="0x020700" vendor="0x15b3"', 'class="0x020000" vendor="0x15b3" device="0x1021"', "roce"),
        ("mlx5_", "rdmap8s", "efa"),
        ("mlx5_", "cxi", "slingshot"),
        ("mlx5_", "bnxt_re", "roce"),
    ],
)
def test_what_nics_speak_is_of_their_class_id_and_name(tmp_path: Path, old: str, new: str, net: str):
    _, _, machine = made_of(dgx_h100().replace(old, new), tmp_path)
    assert machine.node_types[0].net == net


@pytest.mark.parametrize(
    ("old", "new", "net"),
    [
        ("mlx5_", "mlx5_", "ib_host"),
        ('class="0x020700" vendor="0x15b3"', 'class="0x020000" vendor="0x15b3" device="0x1021"', "ib_host"),
        ("mlx5_", "rdmap8s", "efa_host"),
    ],
)
def test_nics_of_a_dump_that_do_not_reach_gpus_are_played_so_and_said(tmp_path: Path, old: str, new: str, net: str):
    text = re.sub(r'(<net [^>]*?)(?: gdr="1")?(/>)', r'\1 gdr="0"\2', dgx_h100().replace(old, new))
    said, _, machine = made_of(text, tmp_path)
    assert machine.node_types[0].net == net
    assert "GPUDirect RDMA is off, as the file has it (gdr 0)" in said
    some = tmp_path / "some"
    some.mkdir()
    said, _, machine = made_of(text.replace('gdr="0"', 'gdr="1"', 1), some)
    assert not machine.node_types[0].net.endswith("_host")
    assert "taken as if they did" in said


@pytest.mark.parametrize(("gdr", "net"), [("0", "tcp"), ("1", "tcpxo")])
def test_googles_nics_speak_tcp_or_what_its_plugin_makes_of_it(tmp_path: Path, gdr: str, net: str):
    text = dgx_h100().replace('class="0x020700" vendor="0x15b3"', 'class="0x020000" vendor="0x1ae0"')
    text = re.sub(r'(<net [^>]*?)(?: gdr="1")?(/>)', rf'\1 gdr="{gdr}"\2', text)
    _, _, machine = made_of(text, tmp_path)
    assert machine.node_types[0].net == net


def test_a_file_written_for_nccl_has_the_boards_nvlink_though_it_lists_gpus(tmp_path: Path):
    gpu = re.compile(r'(<pci busid="\d+:0\d:00.0" class="0x030200"[^>]*)/>')
    inside = gpu.sub(r'\1><gpu dev="0" sm="90" rank="0" gdr="1"/></pci>', tree())
    assert "<gpu" in inside
    said, _, machine = made_of(inside, tmp_path, "--gpu", "H100-SXM5-80GB")
    assert sums(machine, "nvlink") == pytest.approx(450)
    assert "NVLink between the GPUs is that of" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '<system version="1"><cpu numaid="0"><pci busid="0000:00:16.0"/></cpu></system>',
            "1 PCI device without a class",
        ),
        (dump(PAIR * 2, links={}, cpu=' host_hash="0x{}"'), "is of 2 hosts whose NVLinks are one domain"),
        (dump(PAIR, links={}, device="0x740c"), "say --gpu MI250-GCD or --gpu MI250X-GCD"),
    ],
)
def test_what_no_file_of_one_machine_tells_is_asked_for(tmp_path: Path, text: str, said: str):
    with pytest.raises(ClusterSimError, match=said):
        made_of(text, tmp_path)


def test_machines_with_nics_of_another_kind_tell_no_rate(tmp_path: Path):
    with pytest.raises(ClusterSimError, match="shipped machines with these GPUs have 100 and 200 Gb/s; say --nics"):
        made_of(tree(), tmp_path, "--gpu", "A100-SXM4-40GB")
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    with pytest.raises(ClusterSimError, match="have 10 and 100 Gb/s"):
        made_of(matrix(4, 1, "NV2").replace("NIC0", "mlx5_0"), sockets, "--gpu", "V100-SXM2-16GB")


def test_a_coherent_link_stands_for_the_slot_of_a_gpu(tmp_path: Path):
    text = dump(PAIR, links=dict.fromkeys(range(2), '<c2c bw="44712" count="5"/>'), device="0x2941")
    _, _, machine = made_of(text, tmp_path)
    assert sums(machine, "c2c") == pytest.approx(44.712 * 5)
    assert "pcie" not in machine.link_kinds


def test_a_gpu_that_ranks_share_is_one_and_a_tray_says_where_nvlink_ends(tmp_path: Path):
    text = dump(PAIR, links=dict.fromkeys(range(2), nvlink("fffffff:ff:ff.0", "0x068000", 18)), device="0x2941")
    said, _, _ = made_of(text, tmp_path)
    assert "in an NVL72 rack it joins the trays too" in said
    shared = tmp_path / "shared"
    shared.mkdir()
    said, _, machine = made_of(text.replace("</gpu>", '</gpu><gpu dev="0" sm="100" rank="9"/>', 1), shared)
    assert len(machine.node_gpus(0)) == 2
    assert "gpu0: 2 ranks share it" in said


FABRICS = {
    "ibnetdiscover": "# Topology file: generated on Mon Jan 10\nvendid=0x2c9\nswitchguid=0xb8(b8)\n",
    "iblinkinfo": "CA: node0 mlx5_0:\n   0x00a1  10  1[  ] ==( 4X  106.25 Gbps Active/  LinkUp)==>  1\n",
    "Slurm's topology": "SwitchName=s0 Nodes=node[0-3]\nSwitchName=s2 Switches=s[0-1]\n",
    "LLDP": '{"lldp":{"interface":[]}}\n',
}
BLOCKS = {"block plugin": "BlockName=b1 Nodes=n[01-18]\nBlockSizes=16\n", "YAML": "- topology: a\n  tree:\n"}


@pytest.mark.parametrize(("tool", "text"), [*FABRICS.items(), *(("Slurm's topology", t) for t in BLOCKS.values())])
def test_what_tells_switches_alone_is_named_with_what_to_give(tmp_path: Path, tool: str, text: str):
    path = tmp_path / "f"
    path.write_text(text)
    with pytest.raises(TopologyError, match=f"is of {tool}, which tells the network between machines"):
        topology_text([path])


def test_the_channels_that_nccl_chose_are_no_machine(tmp_path: Path):
    path = tmp_path / "f"
    path.write_text('<graphs version="1"><graph id="0" pattern="4"/></graphs>')
    with pytest.raises(TopologyError, match=r"NCCL_GRAPH_DUMP_FILE.*give what NCCL_TOPO_DUMP_FILE"):
        topology_text([path])
