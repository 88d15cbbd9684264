"""A GPU of one's own in a new scenario, plan and topology: ``clustersim new ... --gpu mygpu.toml``."""

from __future__ import annotations

import json
import tomllib

import pytest

ALONE = """[device]
name = "mine"
memory = "100 GiB"
bandwidth = "3 TB/s"
peak = { bf16 = "800 TFLOP/s" }
"""


@pytest.fixture
def gpu_file(tmp_path, clustersim):
    """A GPU like H200, as ``new device`` writes it, with other memory."""
    file = tmp_path / "mygpu.toml"
    assert clustersim("new", "device", file, "--like", "H200").returncode == 0
    file.write_text(file.read_text().replace('# memory = "140.4 GiB"', 'memory = "200 GiB"'))
    return file


def test_two_commands_from_a_gpu_of_ones_own_to_an_answer(clustersim, tmp_path, gpu_file):
    file = tmp_path / "deeper" / "s.toml"
    file.parent.mkdir()
    assert clustersim("new", "scenario", file, "--gpu", gpu_file, "--model", "gpt2").returncode == 0
    cluster = tomllib.loads(file.read_text())["cluster"]
    assert (cluster["topology"], cluster["device"]) == ("hgx-h200", "../mygpu.toml")
    ran = json.loads(clustersim("run", file, "--json").stdout)
    assert (ran["device"], ran["fits"]) == ("mygpu", True)


def test_a_plan_and_a_topology_carry_it(clustersim, tmp_path, gpu_file):
    plan = tmp_path / "p.toml"
    clustersim("new", "plan", plan, "--gpu", gpu_file, "--gpu", "A100", "--model", "gpt2")
    machines = tomllib.loads(plan.read_text())["machines"]
    assert [(machine["topology"], machine.get("device")) for machine in machines] == [
        ("hgx-h200", "mygpu.toml"),
        ("hgx-a100", None),
    ]
    machine = tmp_path / "t.toml"
    assert clustersim("new", "topology", machine, "--gpu", gpu_file, "--nics", "4x200Gb/s").returncode == 0
    checked = clustersim("check", machine, "--nodes", "2").stdout
    assert "16 x mygpu" in checked
    assert "200 GiB at 4800 GB/s" in checked


@pytest.mark.parametrize(
    "words",
    [
        ("scenario",),
        ("plan",),
        ("topology",),
        ("topology", "--topology", "hgx-h100"),
        ("topology", "--mix", "hgx-a100:2"),
    ],
)
def test_an_empty_name_is_no_gpu_and_nothing_is_written(clustersim, tmp_path, words):
    """As a shell has it of a variable that nobody set."""
    kind, *others = words
    refused = clustersim("new", kind, tmp_path / "a.toml", *others, "--gpu", "")
    assert refused.returncode == 2
    assert ("leave --gpu" if "--mix" in words else "cannot tell which GPU ''") in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_beside_a_topology_stands_in_its_sockets(clustersim, tmp_path):
    file = tmp_path / "s.toml"
    clustersim("new", "scenario", file, "--gpu", "H100", "--topology", "hgx-a100", "--model", "gpt2")
    cluster = tomllib.loads(file.read_text())["cluster"]
    assert (cluster["topology"], cluster["device"]) == ("hgx-a100", "H100-SXM5-80GB")
    machine = tmp_path / "t.toml"
    clustersim("new", "topology", machine, "--gpu", "H100", "--topology", "hgx-a100")
    assert tomllib.loads(machine.read_text())["node"] == {"device": "H100-SXM5-80GB"}
    plain = tmp_path / "plain.toml"
    clustersim("new", "scenario", plain, "--gpu", "A100", "--topology", "hgx-a100", "--model", "gpt2")
    assert "device" not in tomllib.loads(plain.read_text())["cluster"]


def test_a_gpu_that_extends_none_needs_a_machine(clustersim, tmp_path):
    gpu = tmp_path / "mine.toml"
    gpu.write_text(ALONE)
    done = clustersim("new", "scenario", tmp_path / "s.toml", "--gpu", gpu)
    assert done.returncode == 2
    assert "it extends no shipped GPU, so no machine is known for it: give --topology" in done.stderr
    assert not (tmp_path / "s.toml").exists()
    assert clustersim("new", "scenario", tmp_path / "s.toml", "--gpu", gpu, "--topology", "hgx-h100").returncode == 0
