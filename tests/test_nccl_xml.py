"""NCCL's dump of a machine becomes the topology file that describes it."""

from __future__ import annotations

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
                f'<pci busid="0000:{gpu}9:00.0" class="0x020000" vendor="0x15b3" {SPEED}><nic>'
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<system><cpu/></system>", "no GPU"),
        ("<topology/>", "holds <topology>"),
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
