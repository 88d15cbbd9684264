"""GPUs as files: what is missing is derived and said, what cannot be is refused with its bound."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import clustersim
from clustersim.cluster import files as fabrics
from clustersim.core import gpu_file
from clustersim.core.device import Assumed, device, devices, unseen_width
from clustersim.core.errors import TopologyError
from clustersim.model.seconds.unstated import doubts, half_width
from clustersim.scenario.result.trust import trust_in

BARE = 'name = "Bare"\nmemory = "96 GiB"\nbandwidth = "3 TB/s"\n'


def written(folder: Path, text: str) -> Path:
    file = folder / "gpu.toml"
    file.write_text(f"[device]\n{text}")
    return file


def test_a_new_gpu_runs_after_two_commands_and_is_the_gpu_it_is_like(clustersim, tmp_path):
    file = tmp_path / "mine.toml"
    assert clustersim("new", "device", file, "--like", "H200").returncode == 0
    done = clustersim("run", "ddp_gpt2_xl_2x8_a100", "--gpu", file, "--json")
    shipped = clustersim("run", "ddp_gpt2_xl_2x8_a100", "--gpu", "H200", "--json")
    ours = json.loads(done.stdout)
    known = json.loads(shipped.stdout)
    assert ours["device"] == "mine"
    assert ours["step_time_s"] == known["step_time_s"]


def test_three_figures_are_enough_and_check_says_what_the_rest_may_cost(clustersim, tmp_path):
    file = written(tmp_path, BARE + 'peak = { bf16 = "800 TFLOP/s" }\n')
    done = clustersim("check", file)
    assert done.returncode == 0
    for field in ("generation", "sms", "clock", "matmul.bf16", "stream"):
        assert f"assumed: {field}" in done.stdout
    assert f"up to {half_width(gpu_file.load(file)):.0%} off" in done.stdout


def test_what_is_assumed_widens_the_range_of_a_run(clustersim, tmp_path):
    file = written(tmp_path, BARE + 'peak = { bf16 = "800 TFLOP/s" }\n')
    ours = json.loads(clustersim("run", "ddp_gpt2_xl_2x8_a100", "--gpu", file, "--json").stdout)
    known = json.loads(clustersim("run", "ddp_gpt2_xl_2x8_a100", "--json").stdout)
    assert "assumed" in " ".join(ours["notes"])
    assert ours["trust"]["p90"] > known["trust"]["p90"]


def test_extending_a_gpu_changes_what_is_written_and_nothing_else(tmp_path):
    base = device("H200-SXM5-141GB")
    ours = gpu_file.load(written(tmp_path, 'name = "Big"\nextends = "H200-SXM"\nmemory = "200 GiB"\n'))
    assert ours.memory_bytes == 200 * 2**30
    assert (ours.peak, ours.memory_bandwidth, ours.sms, ours.clock) == (
        base.peak,
        base.memory_bandwidth,
        base.sms,
        base.clock,
    )
    assert ours.matmul["bf16"].value == base.matmul["bf16"].value
    assert ours.assumed == ()


def test_a_higher_peak_is_faster_and_its_share_is_assumed(tmp_path):
    text = 'name = "Fast"\nextends = "H200-SXM"\npeak = { bf16 = "1500 TFLOP/s", fp8 = "3 PFLOP/s" }\n'
    ours = gpu_file.load(written(tmp_path, text))
    assert ours.matmul_rate("bf16") > device("H200-SXM5-141GB").matmul_rate("bf16")
    assert ours.peak["fp16"] == ours.peak["bf16"]
    assert {entry.field for entry in ours.assumed} >= {"matmul.bf16", "matmul.fp8"}
    assert max(doubt.half_width for doubt in doubts(ours)) > 0.05


def test_a_measured_share_leaves_nothing_to_assume_of_it(tmp_path):
    text = 'name = "Known"\nextends = "H200"\npeak = { bf16 = "1100 TFLOP/s" }\nmatmul = { bf16 = 0.7 }\n'
    ours = gpu_file.load(written(tmp_path, text))
    assert ours.matmul["bf16"].value == 0.7
    assert "matmul.bf16" not in {entry.field for entry in ours.assumed}


def test_a_share_that_nobody_measured_on_a_generation_widens_what_is_computed_in_it(tmp_path):
    """Of MI355X products in bf16 are measured, and those in fp8 estimated: 46 % of the peak."""
    gpu = device("MI355X")
    assert not doubts(gpu, "bf16")
    (doubt,) = doubts(gpu, "fp8")
    assert doubt.assumed.field == "matmul.fp8"
    assert doubt.assumed.spread == unseen_width("fp8")
    assert 0.05 < doubt.half_width < 0.2
    assert not doubts(device("H100-SXM5-80GB"), "fp8")
    wide = trust_in("split", gpu, "fp8")
    narrow = trust_in("split", gpu, "bf16")
    squares = narrow.p90**2 - narrow.unseen_width**2 + wide.unseen_width**2 + doubt.half_width**2
    assert wide.unseen_width == unseen_width("fp8") > narrow.unseen_width
    assert wide.p90 == pytest.approx(math.sqrt(squares))
    assert wide.p50 > narrow.p50
    text = 'name = "MI355X-wide"\nextends = "MI355X"\nmemory = "320 GiB"\n'
    own = gpu_file.load(written(tmp_path, text))
    assert half_width(own, "fp8") == pytest.approx(doubt.half_width)
    measured = gpu_file.load(written(tmp_path, text + "matmul = { fp8 = 0.5 }\n"))
    assert half_width(measured, "fp8") == half_width(own, "bf16") == 0.0


def test_what_is_assumed_of_a_dtype_is_told_of_steps_in_it(clustersim, tmp_path):
    """`check` tried it on a block in bf16, and said that no step depends on it; of fp4, in which none on AMD's runs, it
    said that it is no dtype."""
    file = written(tmp_path, 'name = "MI355X-wide"\nextends = "MI355X"\nmemory = "320 GiB"\n')
    printed = clustersim("check", file).stdout.splitlines()
    (line,) = (line for line in printed if "matmul.fp8" in line)
    assert "a block in fp8 takes -" in line
    (line,) = (line for line in printed if "matmul.fp4" in line)
    assert "no step depends on it" in line


def test_a_split_model_runs_on_a_gpu_that_is_not_shipped(tmp_path):
    """The note on its host looked for it among the shipped ones, so that no split model ran on it."""
    file = written(tmp_path, 'name = "A100-wide"\nextends = "A100-SXM4-80GB"\nmemory = "96 GiB"\n')
    ours, shipped = (
        clustersim.load("1f1b_gpt2_xl_1x8_a100", {"cluster.device": name}).prepare()
        for name in (str(file), "A100-SXM4-80GB")
    )
    assert ours.device.name == "A100-wide"
    assert set(shipped.notes) <= set(ours.notes)


def test_a_cache_that_nobody_states_is_assumed_and_said(clustersim, tmp_path):
    text = BARE + 'generation = "sm86"\nsms = 84\nclock = "1.8 GHz"\ntdp_w = 300\npeak = { bf16 = "155 TFLOP/s" }\n'
    file = written(tmp_path, text)
    ours = gpu_file.load(file)
    assert ours.l2 == 6 * 2**20
    assert "l2" in {entry.field for entry in ours.assumed}
    assert "assumed: l2" in clustersim("check", file).stdout
    stated = gpu_file.load(written(tmp_path, text + 'l2 = "48 MiB"\n'))
    assert stated.l2 == 48 * 2**20
    assert "l2" not in {entry.field for entry in stated.assumed}


def test_what_is_assumed_of_a_gpu_is_assumed_of_one_that_extends_it(tmp_path):
    text = 'name = "Ultra"\nextends = "GB300"\nmemory = "300 GiB"\n'
    assert {entry.field for entry in device("GB300").assumed} == {"sms"}
    assert {entry.field for entry in gpu_file.load(written(tmp_path, text)).assumed} == {"sms"}
    ours = gpu_file.load(written(tmp_path, text + "sms = 160\n"))
    assert {entry.field for entry in ours.assumed} == {"clock"}


def test_a_gpu_before_tensor_cores_has_its_own_work_a_clock(tmp_path):
    ours = gpu_file.load(written(tmp_path, BARE + 'generation = "sm61"\nsms = 28\npeak = { fp32 = "11 TFLOP/s" }\n'))
    assert ours.clock == pytest.approx(11e12 / (28 * 256))


@pytest.mark.parametrize("name", ["RTX-3090", "RTX-4090", "RTX-5090", "RTX-2080-Ti", "L40S", "A100-SXM4-80GB"])
def test_fp32_tells_the_clock_and_the_sms_of_a_gpu_whose_16_bits_are_held_back(name, tmp_path):
    """GeForce's products in 16 bits run at half the rate of the same SM in a data centre."""
    known = device(name)
    half = "bf16" if "bf16" in known.peak else "fp16"
    peak = f'peak = {{ fp32 = "{known.peak["fp32"]} FLOP/s", {half} = "{known.peak[half]} FLOP/s" }}\n'
    text = BARE + f'generation = "{known.arch}"\n{peak}'
    ours = gpu_file.load(written(tmp_path, text + f"sms = {known.sms}\n"))
    assert ours.clock == pytest.approx(known.clock, rel=0.01)
    assert gpu_file.load(written(tmp_path, text)).sms == pytest.approx(known.sms * known.clock / 1.7e9, rel=0.02)


@pytest.mark.parametrize("moves", ["sms", "clock", "bf16", "rate", "memory"])
def test_what_a_block_depends_on_widens_its_range(moves):
    """Attention is in the block: its exponentials are limited by SMs and clock."""
    gpu = replace(device("B200-SXM-180GB"), assumed=(Assumed(moves, "", moves, 0.2),))
    assert half_width(gpu) > 0.001


@pytest.mark.parametrize("moves", ["l2", "tdp_w", "fp4"])
def test_what_no_step_depends_on_is_moved_and_costs_nothing(moves):
    gpu = replace(device("H100"), assumed=(Assumed(moves, "", moves, 0.2),))
    assert half_width(gpu) == 0.0


def test_a_figure_that_nothing_moves_is_no_zero():
    gpu = replace(device("H100"), assumed=(Assumed("voltage", "", "voltage", 0.2),))
    with pytest.raises(AssertionError, match="voltage"):
        half_width(gpu)


def test_a_gpu_of_an_old_generation_has_no_units_that_came_later(tmp_path):
    ours = gpu_file.load(written(tmp_path, BARE + 'generation = "sm70"\npeak = { fp16 = "120 TFLOP/s" }\n'))
    assert set(ours.peak) == {"fp32", "fp16"}
    assert ours.runs_as("bf16") == ours.runs_as("tf32") == "fp32"


@pytest.mark.parametrize("name", sorted(devices()))
def test_a_gpu_that_is_like_a_shipped_one_has_units_for_the_same_dtypes(name, tmp_path):
    """One like MI355X had TF32, which CDNA 4 has no units for: a step in it took 9.4 s in place of 53."""
    ours = gpu_file.load(written(tmp_path, f'name = "mine"\nextends = "{name}"\n'))
    assert ours.peak == devices()[name].peak


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BARE, r"\$\.device\.peak is missing"),
        (BARE + 'peak = { bf16 = "2 TFLOP/s" }\n', r"peak\.bf16: 2 TFLOP/s is less than the memory's own bound"),
        (BARE.replace("96 GiB", "80 MB") + 'peak = { bf16 = "800 TFLOP/s" }\n', r"memory: 80,000,000 bytes"),
        (BARE + 'generation = "sm80"\npeak = { bf16 = "800 TFLOP/s", fp8 = "1600 TFLOP/s" }\n', "sm80 has no fp8"),
        (BARE + 'generation = "gfx90a"\npeak = { bf16 = "400 TFLOP/s", fp8 = "800 TFLOP/s" }\n', "came with gfx942"),
        (BARE + 'generation = "sm70"\npeak = { bf16 = "120 TFLOP/s" }\n', "sm70 has no bf16 units"),
        (BARE + 'generation = "gfx950"\npeak = { bf16 = "2 PFLOP/s", tf32 = "1 PFLOP/s" }\n', "gfx942 alone has them"),
        (BARE + 'peak = { bf16 = "800 TFLOP/s", fp8 = "400 TFLOP/s" }\n', "fewer bits are never slower"),
        (BARE + 'peak = { bf61 = "800 TFLOP/s" }\n', "'bf61' is no dtype of a peak"),
        (BARE + 'generation = "sm91"\npeak = { bf16 = "800 TFLOP/s" }\n', "'sm91' is not known; one of"),
        (BARE + "peak = { bf16 = 800 }\n", "bare number"),
        (BARE + 'sms = 2\ngeneration = "sm90"\npeak = { bf16 = "800 TFLOP/s" }\n', "do not agree"),
        (BARE + 'watts = 3\npeak = { bf16 = "800 TFLOP/s" }\n', r"unknown field `watts`.*tdp_w"),
        ('name = "H100"\nextends = "H200"\n', "is a shipped device; give yours a name of its own"),
        ('name = "X"\nextends = "H999"\n', r"extends: cannot tell which GPU"),
        ('name = "X"\nextends = "H200"\nmatmul = { bf16 = 1.2 }\n', "<= 1"),
    ],
)
def test_what_no_gpu_is_is_one_error_with_field_and_bound(text, message, tmp_path):
    with pytest.raises(TopologyError, match=message) as error:
        gpu_file.load(written(tmp_path, text))
    assert "gpu.toml" in str(error.value)


def test_a_bad_file_is_one_line_and_exit_code_2(clustersim, tmp_path):
    file = written(tmp_path, BARE)
    for command in (("check", file), ("run", "ddp_gpt2_xl_2x8_a100", "--gpu", file)):
        done = clustersim(*command)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


def test_a_topology_carries_the_gpu_that_it_describes(tmp_path):
    file = tmp_path / "box.toml"
    text = 'name = "box"\nextends = "hgx-h100"\n[device]\n' + BARE + 'peak = { bf16 = "800 TFLOP/s" }\n'
    file.write_text(text)
    kind = fabrics.load(str(file)).node_types[0]
    assert (kind.device, kind.gpu.memory_bytes) == ("Bare", 96 * 2**30)
    assert fabrics.load(str(file), device="A100-SXM4-80GB").node_types[0].gpu is device("A100-SXM4-80GB")
    file.write_text(text.replace("[device]", '[node]\ndevice = "A30"\n[device]'))
    with pytest.raises(TopologyError, match=r"\$\.node\.device is 'A30'; \$\.device describes 'Bare'"):
        fabrics.load(str(file))


@pytest.mark.parametrize(("name", "units"), [("MI355X", "256 CUs"), ("H200", "132 SMs")])
def test_check_counts_a_gpu_s_units_in_its_maker_s_word(name, units, clustersim, tmp_path):
    file = written(tmp_path, f'name = "mine"\nextends = "{name}"\n')
    assert f" {units} at " in clustersim("check", file).stdout


@pytest.mark.parametrize(
    ("topology", "name", "links"),
    [
        ("hgx-mi355x", "H200", "xGMI"),
        ("hgx-a100", "MI300X", "NVLink"),
        ("hgx-mi355x", "MI300X", ""),
        ("pcie-a100", "MI210", ""),
    ],
)
def test_gpus_on_a_board_of_another_maker_are_told(topology, name, links):
    changes = {"cluster.topology": topology, "cluster.nodes": 1, "cluster.device": name, "run.steps": 1}
    notes = clustersim.load("ddp_gpt2_xl_2x8_a100", changes).run().notes
    told = [note for note in notes if note.endswith("no such board is made")]
    assert len(told) == bool(links)
    assert all(f"whose links are {links}" in note for note in told)
