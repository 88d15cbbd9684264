"""Machines as tools print them: matrices of other boards, lstopo, rocm-smi, and ibstat and nvlink -s beside."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from clustersim.app.cli import cli
from clustersim.cluster import files as fabrics
from clustersim.cluster.files.check import check
from clustersim.cluster.files.nccl_xml import topology_text
from clustersim.core.errors import TopologyError

PAIRED = """GPU0\tGPU1\tGPU2\tGPU3\tmlx5_0\tmlx5_1\tmlx5_2\tmlx5_3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tNV12\tNV12\tPXB\tPXB\tSYS\tSYS\t0-15\t1
GPU1\tNV12\t X \tNV12\tNV12\tPXB\tPXB\tSYS\tSYS\t0-15\t1
GPU2\tNV12\tNV12\t X \tNV12\tSYS\tSYS\tPXB\tPXB\t16-31\t0
GPU3\tNV12\tNV12\tNV12\t X \tSYS\tSYS\tPXB\tPXB\t16-31\t0
mlx5_0\tPXB\tPXB\tSYS\tSYS\t X \tPXB\tSYS\tSYS
mlx5_1\tPXB\tPXB\tSYS\tSYS\tPXB\t X \tSYS\tSYS
mlx5_2\tSYS\tSYS\tPXB\tPXB\tSYS\tSYS\t X \tPXB
mlx5_3\tSYS\tSYS\tPXB\tPXB\tSYS\tSYS\tPXB\t X 
"""
"""GPUs that NVLink joins: that two share a switch, only their NICs tell."""


def made(folder: Path, *texts: str, gpu: str | None = None, nics: tuple[int, float] | None = None):
    """The machine of files, the first of which tells it."""
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"given{number}.txt")
        paths[-1].write_text(text)
    out = folder / "made.toml"
    out.write_text(topology_text(paths, gpu, nics))
    return fabrics.load(str(out))


def switch_of(machine, name: str) -> str:
    """What a part hangs from by PCIe."""
    part = machine.vertex_names.index(name)
    links = [i for i in np.flatnonzero(machine.link_src == part) if machine.link_kinds[i] == "pcie"]
    return machine.vertex_names[machine.link_dst[links[0]]]


def gbps(machine) -> list[float]:
    """Gb/s of each NIC's ports."""
    names = sorted(name for name, kind in zip(machine.vertex_names, machine.vertex_kinds, strict=True) if kind == "nic")
    net = np.array([kind == "net" for kind in machine.link_kinds])
    rates = [machine.link_bandwidth[net & (machine.link_src == machine.vertex_names.index(name))] for name in names]
    return [round(float(rate.sum()) * 8 / 1e9, 1) for rate in rates]


# ---- the matrix ------------------------------------------------------------------------------------------------------


def test_two_gpus_that_share_a_nic_share_its_switch(tmp_path: Path):
    machine = made(tmp_path, PAIRED, gpu="A100-SXM4-80GB")
    homes = {name: switch_of(machine, f"node0/{name}") for name in ("gpu0", "gpu1", "nic0", "nic1", "gpu2", "nic2")}
    assert len({homes[name] for name in ("gpu0", "gpu1", "nic0", "nic1")}) == 1
    assert homes["gpu2"] == homes["nic2"] != homes["gpu0"]


def test_pix_inside_of_pxb_is_a_switch_below_a_switch(tmp_path: Path):
    words = [line.split("\t") for line in PAIRED.splitlines()]
    for gpu, nic in (("GPU0", "mlx5_0"), ("GPU1", "mlx5_1")):
        for a, b in ((gpu, nic), (nic, gpu)):
            row = next(line for line in words[1:] if line[0] == a)
            row[1 + words[0].index(b)] = "PIX"
    machine = made(tmp_path, "\n".join("\t".join(line) for line in words), gpu="A100-SXM4-80GB")
    own = switch_of(machine, "node0/gpu0")
    assert own == switch_of(machine, "node0/nic0") != switch_of(machine, "node0/gpu1")
    outer = machine.vertex_names.index(own)
    peers = {machine.vertex_names[i] for i in machine.link_dst[machine.link_src == outer].tolist()}
    assert any(name.startswith("node0/pcie") for name in peers)


@pytest.mark.parametrize(
    "before",
    [
        "$ nvidia-smi topo -m\n\t",
        "+ nvidia-smi topo -m\n        ",
        "\x1b[4m",
        "[4m",
        "\t",
        "Tue Nov 4 10:00:00 2025\n\n   ",
    ],
)
def test_what_a_terminal_or_a_page_puts_before_the_matrix_changes_nothing(tmp_path: Path, before: str):
    plain = topology_text(_file(tmp_path, PAIRED), "A100-SXM4-80GB")
    text = PAIRED.replace("NUMA Affinity\n", "NUMA Affinity\x1b[0m\n") if "\x1b" in before else PAIRED
    assert topology_text(_file(tmp_path, before + text.replace("\n", "\r\n")), "A100-SXM4-80GB") == plain


def test_without_numa_nodes_cores_tell_cpus_apart(tmp_path: Path):
    rows = [line.rsplit("\t", 1)[0] if line.startswith("GPU") else line for line in PAIRED.splitlines()]
    machine = made(tmp_path, "\n".join(rows), gpu="A100-SXM4-80GB")
    assert sum(kind == "cpu" for kind in machine.vertex_kinds) == 2


def _file(folder: Path, text: str) -> Path:
    path = folder / "given.txt"
    path.write_bytes(text.encode())
    return path


# ---- beside it -------------------------------------------------------------------------------------------------------


def ibstat(*rates: float) -> str:
    """As infiniband-diags prints it; 0 is a port that is down."""
    return "".join(
        f"CA 'mlx5_{i}'\n\tCA type: MT4129\n\tNumber of ports: 1\n\tPort 1:\n"
        f"\t\tState: {'Active' if rate else 'Down'}\n\t\tPhysical state: LinkUp\n"
        f"\t\tRate: {rate or 40:g}\n\t\tLink layer: InfiniBand\n"
        for i, rate in enumerate(rates)
    )


def devinfo(width: int, speed: int) -> str:
    """As ibv_devinfo -v prints four NICs."""
    return "".join(
        f"hca_id:\tmlx5_{i}\n\ttransport:\t\t\tInfiniBand (0)\n\t\tport:\t1\n\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n"
        f"\t\t\tactive_width:\t\t4X ({width})\n\t\t\tactive_speed:\t\t100.0 Gbps ({speed})\n\n"
        for i in range(4)
    )


def test_ibstat_beside_says_each_nics_rate_and_which_are_down(tmp_path: Path):
    machine = made(tmp_path, PAIRED, ibstat(400, 200, 400, 0), gpu="A100-SXM4-80GB")
    assert gbps(machine) == [400, 200, 400]
    assert any("mlx5_3 is left out: ibstat says that it is down" in line for line in machine.assumed)
    assert not any("Gb/s" in line for line in machine.assumed)


@pytest.mark.parametrize(("width", "speed", "rate"), [(2, 128, 400), (2, 64, 200), (2, 32, 100), (1, 128, 100)])
def test_ibv_devinfo_beside_says_lanes_times_their_rate(tmp_path: Path, width: int, speed: int, rate: float):
    assert set(gbps(made(tmp_path, PAIRED, devinfo(width, speed), gpu="A100-SXM4-80GB"))) == {rate}


def test_nics_by_number_are_named_by_the_legend(tmp_path: Path):
    text = PAIRED
    for i in range(4):
        text = text.replace(f"mlx5_{i}", f"NIC{i}")
    legend = "\nNIC Legend:\n\n" + "".join(f"  NIC{i}: mlx5_{3 - i}\n" for i in range(4))
    assert gbps(made(tmp_path, text + legend, ibstat(100, 200, 300, 400), gpu="A100-SXM4-80GB")) == [400, 300, 200, 100]
    with pytest.raises(TopologyError, match=r"which port of ibstat its NIC 'NIC0' is.*--nics 4x400Gb/s"):
        made(tmp_path, text, ibstat(100, 200, 300, 400), gpu="A100-SXM4-80GB")


def nvlinks(working: int, gpus: int = 4) -> str:
    lines = []
    for gpu in range(gpus):
        lines.append(f"GPU {gpu}: NVIDIA A100-SXM4-80GB (UUID: GPU-{gpu})")
        lines += [f"\t Link {i}: {'25 GB/s' if i < working or gpu else '<inactive>'}" for i in range(12)]
    return "\n".join(lines)


def test_nvlink_status_beside_names_the_gpu_and_what_does_not_work(tmp_path: Path):
    named = made(tmp_path, PAIRED, nvlinks(12))
    assert named.node_types[0].device == "A100-SXM4-80GB"
    assert not any("NVLinks work" in line for line in named.assumed)
    broken = made(tmp_path, PAIRED, nvlinks(9))
    assert any("gpu0: 9 of 12 NVLinks work" in line for line in broken.assumed)
    with pytest.raises(TopologyError, match=r"has 4 GPUs, and given1\.txt has 8"):
        made(tmp_path, PAIRED, nvlinks(12, gpus=8))


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ((ibstat(400),), "is of ibstat, which does not tell how"),
        ((devinfo(2, 128), nvlinks(12)), "is of ibv_devinfo and nvidia-smi nvlink -s, which does not"),
        ((PAIRED, PAIRED), "tells a machine, and so does"),
        ((PAIRED, ibstat(400).split("Rate")[0]), "no State or no Rate"),
        ((PAIRED, devinfo(2, 99)), "active_speed 99 is not known"),
        ((PAIRED, devinfo(2, 128).replace("active_speed", "x")), "print it with ibv_devinfo -v"),
    ],
)
def test_files_that_tell_no_machine_or_two_are_refused(tmp_path: Path, texts: tuple[str, ...], words: str):
    with pytest.raises(TopologyError, match=words):
        made(tmp_path, *texts, gpu="A100-SXM4-80GB")


# ---- rocm-smi and lstopo ---------------------------------------------------------------------------------------------


def rocm(word: str, gpus: int = 8) -> str:
    """As rocm-smi --showtopo prints it."""
    names = [f"GPU{i}" for i in range(gpus)]
    rows = [f"{name} " + " ".join("0" if i == j else word for j in range(gpus)) for i, name in enumerate(names)]
    nodes = "".join(f"GPU[{i}]\t\t: (Topology) Numa Node: {2 * i // gpus}\n" for i in range(gpus))
    head = "======= ROCm System Management Interface =======\n======= Link Type between two GPUs =======\n"
    return (
        head
        + "\n".join(["   " + " ".join(names), *rows])
        + f"\n\n======= Numa Nodes =======\n{nodes}====== End ======\n"
    )


def test_rocm_smi_says_what_joins_gpus_and_the_board_how_fast(tmp_path: Path):
    machine = made(tmp_path, rocm("XGMI"), gpu="MI300X", nics=(8, 400))
    xgmi = np.array([kind == "xgmi" for kind in machine.link_kinds])
    assert machine.link_bandwidth[xgmi & (machine.link_src == machine.node_gpus(0)[0])].sum() == pytest.approx(7 * 64e9)
    assert gbps(machine) == [400] * 8
    assert any("near which GPU" in line for line in machine.assumed)
    plain = made(tmp_path, rocm("PCIE"), gpu="MI300X")
    assert "xgmi" not in plain.link_kinds
    assert any("no xGMI joins the GPUs" in line for line in plain.assumed)
    with pytest.raises(TopologyError, match="is not whole"):
        made(tmp_path, rocm("XGMI").replace("XGMI", "?", 1), gpu="MI300X")


SLOT = 'type="Bridge" bridge_type="1-1" pci_type="0604 [8086:352a]" pci_link_speed="63.015385"'
NIC = '<object type="PCIDev" pci_busid="0:18:0" pci_type="0207 [15b3:1021]" pci_link_speed="63.015385">'
NIC += '<object type="OSDev" name="mlx5_0" osdev_type="3"/></object>'
GPU = '<object type="PCIDev" pci_busid="0:1b:0" pci_type="0302 [10de:2330]" pci_link_speed="63.015385"/>'
LSTOPO = f"""<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0"><object type="Machine"><object type="Package">
<info name="CPUVendor" value="GenuineIntel"/><info name="CPUModelNumber" value="143"/>
<object type="NUMANode" os_index="0"/>
<object type="Bridge" bridge_type="0-1"><object {SLOT}><object {SLOT}>
<object {SLOT}>{NIC}</object><object {SLOT}>{GPU}</object></object></object></object></object>
<object type="Package"><object type="NUMANode" os_index="1"/><object type="Bridge" bridge_type="0-1">
<object {SLOT}>{GPU.replace("1b", "9b")}</object>
<object type="PCIDev" pci_type="0200 [8086:1533]"><object type="OSDev" name="eno1" osdev_type="2"/></object>
</object></object></object></topology>"""


def test_lstopo_tells_the_pci_tree_without_ports_that_are_no_switch(tmp_path: Path):
    machine = made(tmp_path, LSTOPO)
    assert machine.node_types[0].device == "H100-SXM5-80GB"
    kinds = [kind for kind, node in zip(machine.vertex_kinds, machine.vertex_node, strict=True) if node == 0]
    assert [kinds.count(kind) for kind in ("cpu", "pcie_switch", "gpu", "nic")] == [2, 1, 2, 1]
    assert switch_of(machine, "node0/gpu0") == switch_of(machine, "node0/nic0") == "node0/pcie0"
    assert switch_of(machine, "node0/gpu1") == "node0/cpu1"
    pcie = np.array([kind == "pcie" for kind in machine.link_kinds])
    assert machine.link_bandwidth[pcie] == pytest.approx(63.015e9, rel=1e-4)
    assert any("NVLink between the GPUs is that of" in line for line in machine.assumed)


def test_lstopo_of_an_arm_machine_is_of_arm_and_a_file_without_a_maker_says_it_assumes_one(tmp_path: Path):
    arm = LSTOPO.replace('type="Machine">', 'type="Machine"><info name="Architecture" value="aarch64"/>')
    arm = arm.replace('<info name="CPUVendor" value="GenuineIntel"/>', "")
    assert made(tmp_path, arm).node_types[0].cpu_vendor == "arm"
    assert "cpu_vendor" not in made(tmp_path, LSTOPO).node_types[0].sources
    assert "assumed" in made(tmp_path, rocm("XGMI"), gpu="MI300X").node_types[0].sources["cpu_vendor"]


@pytest.mark.parametrize(("layer", "net"), [("Ethernet", "roce"), ("InfiniBand", "ib")])
@pytest.mark.parametrize("tool", ["ibstat", "ibstatus"])
def test_a_ports_link_layer_says_what_joins_the_nodes(tmp_path: Path, tool: str, layer: str, net: str):
    ports = {
        "ibstat": "CA 'mlx5_{0}'\n\tPort 1:\n\t\tState: Active\n\t\tRate: 200\n\t\tLink layer: {1}\n",
        "ibstatus": (
            "Infiniband device 'mlx5_{0}' port 1 status:\n\tstate:\t\t 4: ACTIVE\n\tphys state:\t 5: LinkUp\n"
            "\trate:\t\t 200 Gb/sec (4X HDR)\n\tlink_layer:\t {1}\n\n"
        ),
    }
    machine = made(tmp_path, PAIRED, "".join(ports[tool].format(i, layer) for i in range(10)), gpu="A100-SXM4-80GB")
    assert machine.node_types[0].net == net
    assert "net" not in machine.node_types[0].sources
    assert set(gbps(machine)) == {200}
    with pytest.raises(TopologyError, match="was the text cut off"):
        made(tmp_path, PAIRED, re.split(r"\b[Rr]ate:", ports[tool].format(0, layer))[0], gpu="A100-SXM4-80GB")


def test_nics_of_unknown_kind_are_of_that_of_a_machine_with_these_gpus(tmp_path: Path):
    node = made(tmp_path, rocm("XGMI"), gpu="MI300X", nics=(8, 400)).node_types[0]
    assert (node.net, node.sources["net"]) == ("roce", "assumed: as in a shipped machine with these GPUs")


# ---- what the matrix and the GPU that is named say of each other -----------------------------------------------------


def matrix(gpus: int, word) -> str:
    """As nvidia-smi topo -m prints it of GPUs alone; ``word`` of two numbers."""
    names = [f"GPU{i}" for i in range(gpus)]
    rows = [
        "\t".join([name, *("X" if i == j else word(i, j) for j in range(gpus)), "0-31", "0"])
        for i, name in enumerate(names)
    ]
    return "\n".join(["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity"]), *rows]) + "\n"


def paired(i: int, j: int) -> str:
    return "NV12" if i // 2 == j // 2 else "NODE"


def test_gpus_with_more_nvlinks_than_the_named_one_has_are_other_gpus(tmp_path: Path):
    with pytest.raises(TopologyError, match="GPU0 has 12 NVLinks to other GPUs, and a RTX-A6000 has 4; is it this GPU"):
        made(tmp_path, matrix(8, paired), gpu="A6000")
    for gpu in ("H100-NVL", "H100-PCIe-80GB"):  # the second where a bridge joins two cards
        bridged = made(tmp_path, matrix(8, paired), gpu=gpu)
        assert "nvswitch" not in bridged.vertex_kinds
        assert sum(kind == "nvlink" for kind in bridged.link_kinds) == 8


def test_a_tray_of_a_rack_says_where_nvlink_ends(tmp_path: Path):
    tray = made(tmp_path, matrix(4, lambda i, j: "NV18"), gpu="GB200")
    assert any("in an NVL72 rack it joins the trays too" in line for line in tray.assumed)
    assert not made(tmp_path, matrix(8, lambda i, j: "NV18"), gpu="H100-SXM5-80GB").assumed


def tray_with_nics() -> str:
    """As nvidia-smi prints it of two Graces, whose NICs are far from every GPU."""
    parts = [*(f"GPU{i}" for i in range(4)), *(f"NIC{i}" for i in range(4))]
    rows = ["\t".join(["", *parts, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for i, name in enumerate(parts):
        words = ["X" if i == j else "NV18" if max(i, j) < 4 else "SYS" for j in range(8)]
        rows.append("\t".join([name, *words, *([f"{72 * (i // 2)}-1", f"{i // 2},2", "N/A"] if i < 4 else [])]))
    return "\n".join([*rows, ""])


def test_nics_that_are_far_from_every_gpu_are_spread_over_the_cpus_and_said(tmp_path: Path):
    tray = made(tmp_path, tray_with_nics(), gpu="GB200", nics=(4, 400.0))
    assert tray.vertex_kinds.count("cpu") == 2
    assert any("being far (SYS) from every GPU" in line for line in tray.assumed)
    assert tray.node_types[0].cpu_vendor == "arm"
    assert any("no NVLink-C2C" in line for line in tray.assumed)


def amd(gpus: int) -> str:
    """As amd-smi topology prints it."""
    names = [f"0000:{i:02x}:00.0" for i in range(gpus)]
    tables = []
    for title, word in (("ACCESS", "ENABLED"), ("LINK TYPE", "XGMI"), ("HOPS", "1")):
        rows = [f"{name} " + " ".join("SELF" if i == j else word for j in range(gpus)) for i, name in enumerate(names)]
        tables.append(f"{title} TABLE:\n" + "\n".join(["   " + " ".join(names), *rows]) + "\n")
    return "\n".join(tables)


def test_amd_smi_says_what_joins_gpus(tmp_path: Path):
    machine = made(tmp_path, amd(8), gpu="MI300X")
    assert sum(kind == "xgmi" for kind in machine.link_kinds) == 8 * 7
    assert any("one NUMA node" in line for line in machine.assumed)
    with pytest.raises(TopologyError, match="is not whole"):
        made(tmp_path, amd(8).replace("XGMI", "?", 1), gpu="MI300X")


def test_a_map_of_the_network_is_no_machine(tmp_path: Path):
    text = '#\n# Topology file: generated on Tue Jan  2 2024\n#\nswitchguid=0xb8ce(b8ce)\nSwitch\t41 "S-b8ce"\n'
    with pytest.raises(TopologyError, match=r"is of ibnetdiscover.*\[fabric\]"):
        made(tmp_path, text)


BESIDE = {
    "table": "|   0  {gpu}          On  |   00000000:19:00.0 Off |                    0 |\n",
    "list": "GPU 0: {gpu} (UUID: GPU-1)\n",
    "collect_env": "GPU models and configuration: \nGPU 0: {gpu}\nGPU 1: {gpu}\n",
    "csv": "index, name, memory.total [MiB]\n0, {gpu}, 81559 MiB\n",
}


@pytest.mark.parametrize("how", BESIDE)
def test_what_nvidia_smi_prints_beside_the_matrix_names_the_gpu(tmp_path: Path, how: str):
    text = BESIDE[how] + "\n" + matrix(8, lambda i, j: "NV18")
    machine = made(tmp_path, text.replace("{gpu}", "NVIDIA H100 80GB HBM3"), gpu=None)
    assert {kind.device for kind in machine.node_types} == {"H100-SXM5-80GB"}
    with pytest.raises(TopologyError, match=r"beside the matrix stand the GPUs NVIDIA A100-SXM\.\.\.; say --gpu"):
        made(tmp_path, text.replace("{gpu}", "NVIDIA A100-SXM..."), gpu=None)
    with pytest.raises(TopologyError, match="named beside the matrix, 'NVIDIA H1', is not known; say --gpu"):
        made(tmp_path, text.replace("{gpu}", "NVIDIA H1"), gpu=None)
    with pytest.raises(TopologyError, match="does not say which GPUs these are; say --gpu"):
        made(tmp_path, matrix(8, lambda i, j: "NV18"), gpu=None)


@pytest.mark.parametrize(
    ("word", "warned"),
    [
        (lambda i, j: "NV16" if 3 in (i, j) else "NV18", True),
        (lambda i, j: "NV18", False),
        (lambda i, j: "NV10" if i // 2 == j // 2 == 1 else paired(i, j), True),
        (paired, False),
        (lambda i, j: "NV1" if i + j == 7 else "NV2" if abs(i - j) == 1 else "SYS", False),  # a mesh
    ],
)
def test_a_gpu_with_fewer_nvlinks_than_its_neighbours_is_told(tmp_path: Path, word, warned: bool):
    gpu = "H100-SXM5-80GB" if "NV18" in (word(0, 1), word(4, 5)) else "H100-NVL"
    warnings = check(made(tmp_path, matrix(8, word), gpu=gpu)).warnings
    assert any("is a link down" in line for line in warnings) == warned


def test_ports_of_one_nic_with_different_rates_are_told(tmp_path: Path):
    def dump(*rates: int) -> str:
        nets = "".join(f'<net name="mlx5_{i}" dev="{i}" speed="{rate}"/>' for i, rate in enumerate(rates))
        gpu = '<pci busid="0000:0a:00.0" class="0x030200" device="0x2330" link_speed="32.0 GT/s"><gpu sm="90"/></pci>'
        nic = (
            f'<pci busid="0000:0b:00.0" class="0x020700" device="0x1021" link_speed="32.0 GT/s"><nic>{nets}</nic></pci>'
        )
        return f'<system version="1"><cpu numaid="0">{gpu}{nic}</cpu></system>'

    told = made(tmp_path, dump(400000, 100000)).assumed
    assert any("nic0: ports of 400 and 100 Gb/s are taken together" in line for line in told)
    assert not any("ports" in line for line in made(tmp_path, dump(400000, 100000), nics=(1, 400.0)).assumed)
    assert not any("ports" in line for line in made(tmp_path, dump(200000, 200000)).assumed)


# ---- what real files are like ----------------------------------------------------------------------------------------


def amd_dump(device: str, arch: str, links: int, head: str = "") -> str:
    """Two GPUs of AMD as RCCL dumps them, joined by so many xGMI."""
    gpu = (
        '<pci busid="0000:{0}:00.0" class="0x038000" vendor="0x1002" device="{2}" link_speed="16.0 GT/s PCIe" '
        'link_width="16"><gpu dev="{3}" sm="90" gcn="{4}" rank="{3}" gdr="1">'
        '<xgmi target="0000:{1}:00.0" count="{5}" tclass="0x038000"/></gpu></pci>'
    )
    both = (gpu.format(*ends, device, rank, arch, links) for rank, ends in enumerate((("29", "2c"), ("2c", "29"))))
    return f'{head}<system version="2"><cpu numaid="0">{"".join(both)}</cpu></system>'


@pytest.mark.parametrize(
    ("gpu", "of_one"), [("MI100", 46.0), ("MI210", 50.0), ("MI250X-GCD", 50.0), ("MI300X", 64.0), ("MI355X", 76.8)]
)
def test_an_xgmi_is_as_fast_as_the_gpus_it_joins_have_it(tmp_path: Path, gpu: str, of_one: float):
    machine = made(tmp_path, amd_dump("0x1", "x", 2), gpu=gpu)
    wires = [machine.link_bandwidth[i] / 1e9 for i, kind in enumerate(machine.link_kinds) if kind == "xgmi"]
    assert wires == pytest.approx([2 * of_one] * 2)
    assert machine.assumed == ()


def test_old_dumps_say_the_architecture_alone(tmp_path: Path):
    assert made(tmp_path, amd_dump("", "908", 1)).node_types[0].device == "MI100"
    with pytest.raises(TopologyError, match="say --gpu"):
        made(tmp_path, amd_dump("", "910", 1))  # MI210 and MI250 alike


def test_comments_that_nccl_passes_over_and_xml_forbids_are_passed_over(tmp_path: Path):
    head = "<!--------\n - terms of use -- of a maker\n -------->\n"
    assert made(tmp_path, amd_dump("0x7408", "910", 4, head)).node_types[0].n_gpus == 2
    with pytest.raises(TopologyError, match="line 5"):  # lines are those of the file
        made(tmp_path, head + "\n<system><cpu")


def matrix_with_far_nics(beside: int, far: int, joined: str) -> str:
    """Eight GPUs, NICs below the switches of the first of them, and NICs of the host."""
    nics = [f"NIC{i}" for i in range(beside + far)]
    gpus = [f"GPU{i}" for i in range(8)]
    rows = ["\t".join(["", *gpus, *nics, "CPU Affinity", "NUMA Affinity"])]
    for i, name in enumerate([*gpus, *nics]):
        words = [joined if i < 8 else "PIX" if i - 8 == j < beside else "SYS" for j in range(8)]
        words += ["PIX" if i < 8 and i == j < beside else "SYS" for j in range(beside + far)]
        words[i] = "X"
        rows.append("\t".join([name, *words, *(["0-47", "0"] if i < 8 else [])]))
    return "\n".join([*rows, ""])


@pytest.mark.parametrize("far", [1, 2, 26])
def test_nics_away_from_the_gpus_without_a_rate_are_left_out_and_said(tmp_path: Path, far: int):
    text = matrix_with_far_nics(8, far, "NV18")
    machine = made(tmp_path, text, gpu="H100-SXM5-80GB")
    assert len(gbps(machine)) == 8
    assert any("NIC8" in line and f"--nics {8 + far}x400Gb/s" in line for line in machine.assumed)
    assert len(gbps(made(tmp_path, text, gpu="H100-SXM5-80GB", nics=(8 + far, 400.0)))) == 8 + far
    port = "CA 'NIC{}'\n\tPort 1:\n\t\tState: Active\n\t\tRate: 100\n"
    known = made(tmp_path, text, "".join(map(port.format, range(8 + far))), gpu="H100-SXM5-80GB")
    assert gbps(known) == [100.0] * (8 + far)  # with a rate they are NICs as any


def test_where_no_nic_is_beside_a_gpu_all_stay(tmp_path: Path):
    assert len(gbps(made(tmp_path, matrix_with_far_nics(0, 4, "NV18"), gpu="H100-SXM5-80GB"))) == 4


def test_a_matrix_of_pcie_alone_hides_nvlink_and_does_not_lack_it(tmp_path: Path):
    text = matrix_with_far_nics(8, 0, "SYS")
    machine = made(tmp_path, "$ nvidia-smi topo -mp\n" + text, gpu="H100-SXM5-80GB")
    assert "nvlink" in machine.link_kinds
    assert any("topo -mp, which shows PCIe alone" in line for line in machine.assumed)
    bare = made(tmp_path, text, gpu="H100-SXM5-80GB")
    assert "nvlink" not in bare.link_kinds
    assert any("is it working, or is the file of nvidia-smi topo -mp" in line for line in bare.assumed)


def test_mig_instances_are_no_gpus(tmp_path: Path):
    listed = "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)\n  MIG 1g.5gb      Device  0: (UUID: MIG-2)\n"
    with pytest.raises(TopologyError, match="cut into MIG instances"):
        made(tmp_path, listed + matrix_with_far_nics(1, 0, "NV12"))


@pytest.mark.parametrize("text", [amd_dump("0x7408", "910", 4), matrix_with_far_nics(1, 0, "NV18"), "Machine (504GB)"])
def test_a_found_machine_where_a_topology_is_asked_for_is_told_what_makes_one(tmp_path: Path, text: str):
    path = tmp_path / "found.txt"
    path.write_text(text)
    with pytest.raises(TopologyError, match=r"clustersim new topology machine\.toml --from .*found\.txt"):
        fabrics.load(str(path))


def with_words_glued(text: str) -> str:
    """Columns between which a report has lost the space, of the head and of a row."""
    return text.replace("NIC6\tNIC7", "NIC6NIC7").replace("SYS\tSYS\t0-47", "SYSSYS      0-47")


def test_columns_between_which_a_report_loses_the_space_are_read(tmp_path: Path):
    text = matrix_with_far_nics(8, 0, "NV18")
    glued = with_words_glued(text)
    assert "NIC6NIC7" in glued
    assert "SYSSYS" in glued
    plain, same = (made(tmp_path, one, gpu="H100-SXM5-80GB", nics=(8, 400.0)) for one in (text, glued))
    assert same.vertex_names == plain.vertex_names
    assert (same.link_bandwidth == plain.link_bandwidth).all()
    with pytest.raises(TopologyError, match="'SYSNOD' is no word of it"):
        made(tmp_path, glued.replace("SYSSYS", "SYSNOD"), gpu="H100-SXM5-80GB")


def test_a_gpu_whose_nvlinks_are_down_is_off_the_switch_and_said(tmp_path: Path):
    machine = made(tmp_path, matrix(8, lambda i, j: "NODE" if 2 in (i, j) else "NV18"), gpu="B200-SXM-180GB")
    joined = {
        machine.vertex_names[end]
        for end, kind in zip(machine.link_src, machine.link_kinds, strict=True)
        if kind == "nvlink"
    }
    assert {f"node0/gpu{i}" for i in range(8)} - joined == {"node0/gpu2"}
    assert any("gpu2: no NVLink joins it to another GPU" in line for line in machine.assumed)
    with pytest.raises(TopologyError, match="is it this GPU"):  # six pairs of 12 links are no switch's
        made(tmp_path, matrix(8, lambda i, j: "NODE" if 2 in (i, j) else "NV12"), gpu="B200-SXM-180GB")


@pytest.mark.parametrize("far", [0, 2])
def test_nics_below_another_switch_of_the_same_root_are_beside_its_gpus(tmp_path: Path, far: int):
    names = [*(f"GPU{i}" for i in range(4)), *(f"NIC{i}" for i in range(4 + far))]

    def word(i: int, j: int) -> str:
        if i == j:
            return "X"
        if max(i, j) < 4:
            return "NV12"
        sides = [k // 2 if k < 4 else (k - 4) // 2 for k in (i, j)]
        return "SYS" if sides[0] != sides[1] or sides[0] > 1 else "PIX" if min(i, j) > 3 else "PXB"

    rows = [
        [name, *(word(i, j) for j in range(len(names))), *(["0-15", "0"] if i < 4 else [])]
        for i, name in enumerate(names)
    ]
    text = "\n".join("\t".join(row) for row in [["", *names, "CPU Affinity", "NUMA Affinity"], *rows]) + "\n"
    machine = made(tmp_path, text, gpu="A100-SXM4-80GB")
    assert len(gbps(machine)) == 4
    assert any("NIC4" in line and "left out" in line for line in machine.assumed) == bool(far)
    assert len(gbps(made(tmp_path, text, gpu="A100-SXM4-80GB", nics=(4, 100.0)))) == 4


def test_a_gpu_that_is_not_shipped_stands_in_a_found_machine(tmp_path: Path):
    gpu = tmp_path / "mine.toml"
    gpu.write_text('[device]\nname = "Vega20"\nextends = "MI100"\nmemory = "16 GiB"\n')
    dump = _file(tmp_path, amd_dump("", "906", 1))
    out = tmp_path / "found.toml"
    asked = CliRunner().invoke(cli, ["new", "topology", str(out), "--from", str(dump)])
    assert "AMD's architecture 906" in str(asked.exception)
    assert "clustersim new device" in str(asked.exception)
    done = CliRunner().invoke(cli, ["new", "topology", str(out), "--from", str(dump), "--gpu", str(gpu)])
    assert done.exit_code == 0, done.output
    kind = fabrics.load(str(out)).node_types[0]
    assert (kind.device, kind.gpu.memory_bytes, kind.n_gpus) == ("Vega20", 16 * 2**30, 2)


def test_an_architecture_tells_a_dump_from_a_file_that_people_wrote(tmp_path: Path):
    text = re.sub(r"<xgmi[^>]*>", "", amd_dump("", "908", 1))
    assert any("no xGMI joins the GPUs, as the file has it" in line for line in made(tmp_path, text).assumed)


def test_old_dumps_of_an_architecture_of_several_gpus_ask_which(tmp_path: Path):
    with pytest.raises(
        TopologyError, match="architecture 910: which is of MI210, MI250-GCD, MI250X-GCD; say --gpu MI210"
    ):
        made(tmp_path, amd_dump("", "910", 1))
    with pytest.raises(TopologyError, match=r"does not say which GPUs these are; say --gpu$"):
        made(tmp_path, amd_dump("", "", 1))


def test_nvlinks_in_pairs_are_bridges_and_a_gpu_of_a_board_is_doubted(tmp_path: Path):
    doubts = {}
    for gpu in ("A100-SXM4-40GB", "A100-PCIe-40GB"):
        assumed = made(tmp_path, matrix(8, paired), gpu=gpu).assumed
        doubts[gpu] = [line for line in assumed if "is no card" in line]
    assert doubts["A100-PCIe-40GB"] == []
    assert doubts["A100-SXM4-40GB"] == [
        "NVLinks join pairs, as bridges join cards, and A100-SXM4-40GB is no card: is it this GPU?"
    ]


def test_a_matrix_without_some_of_its_rows_names_them(tmp_path: Path):
    text = matrix_with_far_nics(2, 0, "NV18")
    no_gpu = "\n".join(line for line in text.splitlines() if not line.startswith("GPU2"))
    with pytest.raises(TopologyError, match="has columns of GPU2 and no rows of them"):
        made(tmp_path, no_gpu, gpu="H100-SXM5-80GB")
    no_nics = "\n".join(line for line in text.splitlines() if not line.startswith("NIC"))
    with pytest.raises(TopologyError, match=r"has columns of NIC0.* and no rows of them"):
        made(tmp_path, no_nics, gpu="H100-SXM5-80GB")


def test_which_gpus_may_reach_each_other_is_not_what_joins_them(tmp_path: Path):
    with pytest.raises(TopologyError, match=r"topo -p2p does.*give nvidia-smi topo -m"):
        made(tmp_path, " \tGPU0\tGPU1\n GPU0\tX\tGNS\n GPU1\tGNS\tX\n", gpu="A6000")


@pytest.mark.parametrize(("shown", "warned"), [("32.0", False), ("16.0", False), ("2.5", True)])
def test_a_gpu_whose_pcie_sleeps_is_told(tmp_path: Path, shown: str, warned: bool):
    """Idle GPUs and few lanes once looked like nothing."""
    link = 'link_speed="{} GT/s PCIe" link_width="16"'
    gpu = f'<pci busid="0000:03:00.0" class="0x030200" vendor="0x10de" device="0x2331" {link.format(shown)}>'
    nic = f'<pci busid="0000:04:00.0" class="0x020700" vendor="0x15b3" device="0x1021" {link.format("32.0")}>'
    net = '<nic><net name="mlx5_0" dev="0" speed="400000" port="1" gdr="1"/></nic></pci>'
    tree = f'<cpu numaid="0" arch="x86_64" vendor="GenuineIntel">{gpu}<gpu dev="0" sm="90"/></pci>{nic}{net}</cpu>'
    warnings = check(made(tmp_path, f'<system version="1">{tree}</system>')).warnings
    assert any("a GPU that sleeps" in line for line in warnings) is warned


CARDS = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\t0-63\t0\nGPU1\tPHB\t X \t0-63\t0\n"
PEERS = " \tGPU0\tGPU1\n GPU0\tX\t{0}\n GPU1\t{0}\tX\n"


@pytest.mark.parametrize(("word", "gpu", "reach"), [("OK", "RTX-4090", True), ("GNS", "A6000", False)])
def test_whether_gpus_reach_each_other_is_told_beside_the_matrix(tmp_path: Path, word: str, gpu: str, reach: bool):
    """It once was a second machine's matrix, and the file was refused."""
    assert made(tmp_path, CARDS, gpu=gpu).node_types[0].p2p is not reach
    asked = "$ nvidia-smi topo -p2p r\n" + PEERS.format(word)
    assert made(tmp_path, CARDS + asked, gpu=gpu).node_types[0].p2p is reach
    untold = made(tmp_path, CARDS + PEERS.format(word), gpu=gpu)
    assert untold.node_types[0].p2p is not reach
    assert any("not taken from nvidia-smi topo -p2p" in line for line in untold.assumed)


def test_a_tool_of_one_maker_tells_no_gpu_of_another(tmp_path: Path):
    with pytest.raises(TopologyError, match="rocm-smi tells of AMD's GPUs, and a H20-96GB is NVIDIA's"):
        made(tmp_path, rocm("XGMI"), gpu="H20-96GB")
    with pytest.raises(TopologyError, match="nvidia-smi tells of NVIDIA's GPUs, and a MI300X is none"):
        made(tmp_path, matrix(8, lambda i, j: "NODE"), gpu="MI300X")


# ---- what launchers and collectors put before lines ------------------------------------------------------------------

PREFIXES = {
    "pdsh": "node01: ",
    "mpirun": "[1,0]<stdout>: ",
    "kubectl": "2025-11-19T10:11:12.123456789Z ",
    "srun -l": " 0: ",
}


def prefixed(text: str, prefix: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize("before", PREFIXES.values(), ids=PREFIXES)
def test_what_a_launcher_puts_before_lines_changes_nothing(tmp_path: Path, before: str):
    plain = [PAIRED, ibstat(200, 200, 0, 200), nvlinks(12)]
    text = topology_text([_numbered(tmp_path, text, number) for number, text in enumerate(plain)])
    for number, given in enumerate(plain):
        _numbered(tmp_path, prefixed(given, before), number)
    assert topology_text([tmp_path / f"{number}.txt" for number in range(3)]) == text


def _numbered(folder: Path, text: str, number: int) -> Path:
    (folder / f"{number}.txt").write_text(text)
    return folder / f"{number}.txt"


def test_times_of_day_in_a_prefix_may_differ(tmp_path: Path):
    lines = prefixed(rocm("XGMI"), "").splitlines()
    timed = "".join(f"2025-11-19T10:11:{i % 60:02d}.{i:09d}Z {line}\n" for i, line in enumerate(lines))
    assert topology_text(_numbered(tmp_path, timed, 0), "MI300X") == topology_text(
        _numbered(tmp_path, rocm("XGMI"), 0), "MI300X"
    )


def test_two_hosts_lines_between_each_other_are_two_matrices(tmp_path: Path):
    other = PAIRED.replace("NV12", "NV8")
    both = "".join(f"n1: {a}\nn2: {b}\n" for a, b in zip(PAIRED.splitlines(), other.splitlines(), strict=True))
    with pytest.raises(TopologyError, match="matrices of 2 machines that differ"):
        topology_text(_numbered(tmp_path, both, 0), "A100")
    alike = "".join(f"n1: {line}\nn2: {line}\n" for line in PAIRED.splitlines())
    made_of = topology_text(_numbered(tmp_path, alike, 0), "A100", (4, 200.0))
    assert made_of == topology_text(_numbered(tmp_path, PAIRED, 0), "A100", (4, 200.0))


def test_ports_of_two_machines_do_not_add_up(tmp_path: Path):
    """ibstat of two hosts in one file: each NIC had twice its rate."""
    assert gbps(made(tmp_path, PAIRED, ibstat(200, 200, 200, 200) * 2, gpu="A100")) == [200.0] * 4
    with pytest.raises(TopologyError, match="mlx5_0 twice, with 200 and 100 Gb/s, so it is of several machines"):
        made(tmp_path, PAIRED, ibstat(200, 200, 200, 200) + ibstat(100, 200, 200, 200), gpu="A100")


@pytest.mark.parametrize(("gpu", "generation"), [("MI100", 4), ("MI210", 4), ("MI300X", 5)])
def test_pcie_below_rocm_smis_gpus_is_of_their_generation(tmp_path: Path, gpu: str, generation: int):
    text = topology_text(_numbered(tmp_path, rocm("PCIE", 4), 0), gpu)
    assert f"pcie_gen = {generation}\n" in text
    assert ("31.5077 GB/s" in text) == (generation == 4)


def test_numa_nodes_of_some_gpus_alone_are_a_text_that_is_cut_off(tmp_path: Path):
    """Those behind the cut were put on node 0 without a word."""
    text = rocm("XGMI")
    cut = text[: text.index("GPU[6]\t\t: (Topology) Numa Node")]
    with pytest.raises(TopologyError, match=r"no NUMA node of GPU6(?: and|,) GPU7"):
        topology_text(_numbered(tmp_path, cut, 0), "MI300X")


def test_a_pci_device_that_is_there_twice_is_no_second_gpu(tmp_path: Path):
    one = '<pci busid="0000:18:00.0" class="0x030200" device="0x2330"><gpu dev="0" sm="90"/></pci>'
    with pytest.raises(TopologyError, match=r"PCI device 0000:18:00\.0 is there twice"):
        topology_text(_numbered(tmp_path, f'<system><cpu numaid="0">{one}{one}</cpu></system>', 0))


def test_hwlocs_xml_of_a_later_version_is_refused_and_not_read_without_its_nics(tmp_path: Path):
    later = '<topology version="3.0"><object type="Machine"/></topology>'
    with pytest.raises(TopologyError, match=r"hwloc's XML 3\.0, and 1\.x and 2\.x are read"):
        topology_text(_numbered(tmp_path, later, 0))


@pytest.mark.parametrize(("gpu", "rate"), [("H100", 63), ("B200", 63), ("GB300", 126), ("B300", 126), ("RTX 5090", 63)])
def test_pcie_is_of_the_gpus_generation(tmp_path, gpu, rate):
    matrix = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNODE\t0-15\t0\nGPU1\tNODE\t X \t0-15\t0\n"
    machine = made(tmp_path, matrix, gpu=gpu)
    slots = [link for link, kind in enumerate(machine.link_kinds) if kind == "pcie"]
    assert {round(float(machine.link_bandwidth[link]) / 1e9) for link in slots} == {rate}
