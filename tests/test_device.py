"""Devices: every part the topologies name, found by name, alias and free text, with figures that make sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustersim.core.device import SPREADS, _inherit, _whole_entry, device, devices, families
from clustersim.core.device_names import device_from_text, other_parts
from clustersim.core.errors import TopologyError
from clustersim.core.texts import data_table
from clustersim.core.units import parse_bytes
from tests.tables import table_rows

SHARED = Path(__file__).parents[1].parent / "shared" / "measurements"
NAMES = [
    "P100-SXM2-16GB",
    "P100-PCIe-16GB",
    "K80",
    "V100-SXM2-16GB",
    "V100-SXM2-32GB",
    "V100-SXM3-32GB",
    "V100-PCIe-16GB",
    "A100-SXM4-40GB",
    "A100-SXM4-80GB",
    "A100-PCIe-40GB",
    "A100-PCIe-80GB",
    "A800-SXM4-80GB",
    "H100-SXM5-80GB",
    "H100-SXM5-96GB-500W",
    "H100-PCIe-80GB",
    "GH200-96GB",
    "H800-SXM5-80GB",
    "H200-SXM5-141GB",
    "B200-SXM-180GB",
    "GB200-186GB",
    "MI300X",
    "L4",
    "A10",
    "RTX-A6000",
    "RTX-6000-Ada",
    "RTX-8000",
    "RTX-4090",
    "RTX-3090",
    "TITAN-RTX",
    "T4",
    "L40S",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_promised_device_is_found_by_its_own_name(name: str) -> None:
    assert device(name).name == name
    assert device(name.lower()) is device(name)


@pytest.mark.parametrize("name", list(devices()))
def test_figures_are_shares_of_a_peak_with_a_source(name: str) -> None:
    part = device(name)
    for dtype, figure in part.matmul.items():
        assert 0.2 < figure.value <= 1.2, dtype  # gamers' cards run above the boost their peak is stated at
        assert figure.source
    assert 0.5 < part.stream.value <= 1.0
    assert part.source
    assert part.peak["fp32"] <= min(part.peak.values()) * 1.0001
    smallest = 0.1 if part.arch == "cpu" else 1.0  # one core of many
    assert smallest * 1e11 < part.memory_bandwidth < 2e13
    assert smallest * 8e9 < part.memory_bytes < 4e11
    assert part.stream_rate() < part.memory_bandwidth
    assert any("estimated" in note for note in part.notes) == any(
        f.estimated for f in (*part.matmul.values(), part.stream)
    )


@pytest.mark.parametrize(
    ("name", "dtype", "measured"),
    [
        ("A40", "bf16", 122.3),
        ("RTX-A6000", "bf16", 123.3),
        ("RTX-A4000", "fp16", 65.4),
        ("RTX-3090", "fp16", 75.6),
        ("RTX-3090", "fp32", 24.8),
        ("RTX-4090", "tf32", 85.7),
        ("RTX-5090", "bf16", 237.0),
        ("RTX-5080", "fp16", 102.4),
        ("RTX-PRO-6000-Server", "bf16", 417.3),
        ("L4", "bf16", 59.4 / 0.91),
        ("L40S", "fp16", 264.0),
    ],
)
def test_products_of_cards_are_as_fast_as_their_owners_measured(name: str, dtype: str, measured: float) -> None:
    """TFLOP/s of torch.matmul at best (zzc0721/torch-performance-test-data); a step keeps 0.91, what power leaves an L4
    of large products anyway."""
    assert device(name).matmul_rate(dtype) / 1e12 == pytest.approx(measured, rel=0.01)


def test_cards_of_one_chip_that_power_holds_reach_as_much_a_watt() -> None:
    """The L4's own measurement confirms what is taken for other Ada cards: the L40S's FLOP/s a watt."""
    least, most = device("L4"), device("L40S")
    a_watt = most.matmul_rate("fp16") / most.tdp
    assert least.matmul_rate("fp16") / least.tdp == pytest.approx(a_watt, rel=0.1)


@pytest.mark.parametrize("name", list(devices()))
def test_every_figure_of_a_chip_is_stated_or_said_to_be_assumed(name: str) -> None:
    """No law takes the clock or the cache of another GPU in silence."""
    part = device(name)
    row = _inherit(name, data_table("devices")["device"])
    assumed = {entry.field for entry in part.assumed}
    assert assumed == {*row.get("assumed", ()), *({"l2"} - set(row))}
    assert all(any(field in note and "assumed" in note for note in part.notes) for field in assumed)
    assert 0.7e9 < part.clock < 3.1e9
    assert 2**20 <= part.l2 <= part.memory_bytes / 100
    stated = data_table("devices")["device"][name]
    assert "l2" not in stated or "L2" in stated["source"], "a cache without the page it was read on"


FP32_PEAKS = (0.94, 1.16)
"""Peaks over cores times clock: makers' round numbers, and peaks of parts that they clock higher than they say."""


@pytest.mark.parametrize("name", list(devices()))
def test_an_fp32_peak_is_what_its_cores_do_at_its_clock(name: str) -> None:
    """A slip in one of the three is named: a launch is priced by the cores, a product by the peak."""
    part = device(name)
    a_clock = data_table("devices")["family"][part.arch].get("fp32_a_clock")
    if a_clock is None:
        return
    share = part.peak["fp32"] / (part.sms * a_clock * part.clock)
    least, most = FP32_PEAKS
    assert least < share < most, f"{name}: peak.fp32 is {share:.3f} of {a_clock} x sms x clock"


@pytest.mark.parametrize("arch", list(families()))
def test_an_assumed_cache_is_as_far_off_as_it_says(arch: str) -> None:
    kin = [part for part in devices().values() if part.arch == arch and not part.assumed]
    usual = parse_bytes(families()[arch]["l2"])
    assert all(abs(part.l2 / usual - 1.0) <= SPREADS["l2"] for part in kin)


def test_pascal_has_the_clock_that_its_peak_follows_from() -> None:
    """Boost clocks of the data sheets."""
    for name, mhz in (("P100-SXM2-16GB", 1480), ("P40", 1531), ("GTX-1080", 1733), ("M40", 1114), ("K80", 875)):
        assert device(name).clock == pytest.approx(mhz * 1e6, rel=0.003), name


def test_no_alias_names_two_devices() -> None:
    texts = [text for part in devices().values() for text in {t.lower() for t in (part.name, *part.aliases)}]
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("V100-16GB-SXM2 (DGX-1)", "V100-SXM2-16GB"),
        ("V100-32GB (DGX-2)", "V100-SXM2-32GB"),
        ("V100-32GB-SXM3 (DGX-2)", "V100-SXM3-32GB"),
        ("A100-SXM4-80GB (Azure ND A100 v4)", "A100-SXM4-80GB"),
        ("A100 80GB PCIe", "A100-PCIe-80GB"),
        ("LambdaCloud A100 40GB PCIe", "A100-PCIe-40GB"),
        ("LambdaCloud V100 16GB", "V100-SXM2-16GB"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32GB"),
        ("TITAN RTX 24GB", "TITAN-RTX"),
        ("Pascal (P100) x4 per server", "P100-SXM2-16GB"),
        ("GH200-120GB (96GB HBM)", "GH200-96GB"),
        ("GB200 (OCI guide; GB200/GB300 text mixed)", "GB200-186GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Quadro RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("H100-SXM-96GB", "H100-SXM5-96GB-500W"),
        ("H20 141GB SXM", "H20-141GB"),
        ("A100-SXM-64GB (Leonardo)", "A100-SXM-64GB"),
        ("AWS g5.12xlarge, A10G 24GB", "A10G"),
        ("NVIDIA A10-24GB", "A10"),
        ("4 x RTX 2080Ti", "RTX-2080-Ti"),
        ("RTX 2080 8GB", "RTX-2080"),
        ("NVIDIA GeForce GTX 1080 Ti (11 GB)", "GTX-1080-Ti"),
        ("GeForce RTX 3080 Ti 12GB", "RTX-3080-Ti"),
        ("2x RTX-3090", "RTX-3090"),
        ("Quadro RTX 6000 (24 GB)", "RTX-6000-Turing"),
        ("RTX 5000 Ada Generation", "RTX-5000-Ada"),
        ("TITAN V 12GB", "TITAN-V"),
        ("NVIDIA TITAN X (Pascal)", "TITAN-X-Pascal"),
        ("Tesla M40 24GB", "M40-24GB"),
    ],
)
def test_free_text_finds_the_part_it_means(text: str, name: str) -> None:
    assert device_from_text(text).name == name


@pytest.mark.parametrize(
    "text", ["RTX 2080 SUPER", "RTX 4070 Ti SUPER 16GB", "GTX 1060", "RTX 6000", "RTX 5000", "TITAN X", "a2-highgpu-8g"]
)
def test_a_card_that_is_not_known_is_not_taken_for_its_neighbour(text: str) -> None:
    with pytest.raises(TopologyError, match="cannot tell which GPU"):
        device_from_text(text)


def test_a_board_the_text_leaves_open_follows_the_argument() -> None:
    assert device_from_text("A100-40GB").name == "A100-SXM4-40GB"
    assert device_from_text("A100-SXM-40GB", pcie=True).name == "A100-SXM4-40GB"
    assert device_from_text("A100-40GB", pcie=True).name == "A100-PCIe-40GB"
    assert device_from_text("A100 with 40GB", pcie=False).name == "A100-SXM4-40GB"


def test_an_unknown_device_is_one_error_with_the_nearest_name() -> None:
    with pytest.raises(TopologyError, match="did you mean 'H100-SXM5-80GB'"):
        device("H100-SXM5-80G")
    with pytest.raises(TopologyError, match="cannot tell which GPU 'Gaudi 3' is"):
        device_from_text("Gaudi 3")


def test_a_device_of_the_table_that_lacks_a_field_is_named_with_it() -> None:
    table = data_table("devices")["device"]
    entry = {field: value for field, value in table["RTX-4080"].items() if field not in ("source", "sms")}
    with pytest.raises(TopologyError, match=r"devices.toml: missing sms and source \(at \$.device.RTX-4080\)"):
        _whole_entry("RTX-4080", {**table, "RTX-4080": entry})


def test_a_dtype_the_hardware_lacks_runs_on_the_units_it_has() -> None:
    volta = device("V100-SXM2-16GB")
    assert volta.runs_as("tf32") == "fp32"
    assert volta.runs_as("fp8") == "fp16"
    assert device("K80").runs_as("fp16") == "fp32"
    assert device("A100-SXM4-80GB").matmul_rate("bf16") == pytest.approx(271.2e12, rel=1e-3)
    with pytest.raises(TopologyError, match="no rate for dtype 'fp99'"):
        volta.matmul_rate("fp99")


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="the measurement tables are not beside the checkout")
@pytest.mark.parametrize("table", ["training_steps.csv", "nccl_tests.csv"])
def test_every_gpu_a_measurement_table_names_is_known(table: str) -> None:
    texts = {row["gpu"] for row in table_rows(SHARED / table)}
    unnamed = {text for text in texts if not text or "not " in text}
    for text in texts - unnamed:
        assert device_from_text(text).name in devices()


@pytest.mark.skipif(not SHARED.exists(), reason="the shared measurements are not beside the project")
def test_a_gpu_whose_best_products_somebody_searched_for_reaches_them() -> None:
    """ml-engineering's search over shapes: MI325X and MI355X were estimated from MI300X, B300 from B200."""
    best = [
        row for row in table_rows(SHARED / "compute_facts.csv") if row["quantity"].startswith("best achievable matmul")
    ]
    of_gpus = [row for row in best if "Gaudi" not in row["device"]]
    assert len(of_gpus) == 16
    for row in of_gpus:
        gpu = device_from_text(row["device"].replace(" SXM", ""))
        dtype = row["dtype"].split("_")[0]
        assert gpu.peak[dtype] * gpu.matmul[dtype].value == pytest.approx(1e12 * float(row["value"]), rel=0.011), row
        assert not gpu.matmul[dtype].estimated, row


def test_a_gpu_that_is_held_below_what_its_power_allows_reaches_its_peak() -> None:
    """Half of the 16-bit rate that its SMs and clock give, as a GeForce has, needs no more watts than it has."""
    held = {}
    for gpu in devices().values():
        entry = _inherit(gpu.name, data_table("devices")["device"])
        family = data_table("devices")["family"][entry["family"]]
        if family.get("fp32_a_clock") and "clock" in entry and gpu.sm in {86, 89, 120}:
            held[gpu.name] = gpu.peak["fp16"] / (gpu.sms * gpu.clock * family["flop_a_clock"])
    halved = {name for name, share in held.items() if share < 0.51}
    assert {"L40", "L20", "A10G", "RTX-4090", "RTX-3090"} <= halved
    for name in halved:
        assert device(name).matmul["bf16"].value >= 0.9, name


def test_power_limits_are_those_that_were_seen() -> None:
    """1400 W are GB300's: an HGX board's B300 is limited to 1100 W, and large products meet that limit."""
    b300, gb300 = device("B300"), device("GB300")
    assert (b300.sms, b300.l2, b300.tdp) == (148, 126 * 2**20, 1100.0)
    assert gb300.tdp == 1400.0
    assert device("H20").tdp == 500.0  # as nvidia-smi shows it
    assert not b300.assumed


def test_an_unknown_device_is_told_the_nearest_or_every_name_but_no_alias():
    with pytest.raises(TopologyError, match="did you mean"):
        device("H1000-SXM5-80GB")
    with pytest.raises(TopologyError) as told:
        device("zzzzzzzz")
    names = str(told.value).partition("known: ")[2].split(", ")
    assert sorted(names) == sorted(devices())


@pytest.mark.parametrize(
    ("text", "name", "others"),
    [
        ("A100-80", "A100-SXM4-80GB", ["A100-PCIe-80GB"]),  # was taken for 40 GB, in hgx-a100-4gpu-4x200g
        ("A100-40", "A100-SXM4-40GB", ["A100-PCIe-40GB"]),
        ("V100-32", "V100-SXM2-32GB", ["V100-SXM3-32GB", "V100-PCIe-32GB"]),
        ("h100-94gb", "H100-NVL-94GB", []),
        ("H100 80", "H100-SXM5-80GB", ["H100-PCIe-80GB"]),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB", []),
        ("8 x V100", "V100-SXM2-16GB", ["V100-SXM2-32GB", "V100-SXM3-32GB", "V100-PCIe-16GB", "V100-PCIe-32GB"]),
    ],
)
def test_memory_that_a_gpus_name_has_without_its_unit_counts(text, name, others):
    taken = device_from_text(text)
    assert taken.name == name
    assert other_parts(text, taken) == others
