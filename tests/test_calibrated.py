"""A topology carries its fitted constants: every time model uses them, files keep them, and mistakes are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clustersim import collectives
from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group, Request
from clustersim.collectives.costs import costs_of, gloo_costs_of
from clustersim.core.calibrated import PARTS, Calibration, Constant, Provenance, names, unit_of
from clustersim.core.costs import COSTS, GLOO_COSTS, flat, overlaid
from clustersim.core.device import device, with_efficiencies
from clustersim.core.errors import TopologyError
from clustersim.core.topology import Topology

BASE = 'name = "mine"\nextends = "alps-gh200"\n'


def exactly(value: float) -> Constant:
    return Constant(value, value, value)


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def seconds(topology: Topology, request: Request, backend: str = "nccl") -> float:
    group = Group(topology, fabrics.mesh(topology).gpus)
    return collectives.plan(request, group, backend).time(topology.link_bandwidth)


def test_every_constant_can_be_replaced_by_its_flat_name():
    for costs in (COSTS, GLOO_COSTS):
        for name, value in flat(costs).items():
            changed = flat(overlaid(costs, {name: value + 1.0}))
            assert changed.pop(name) == value + 1.0
            assert changed == {key: item for key, item in flat(costs).items() if key != name}
    with pytest.raises(KeyError):
        overlaid(COSTS, {"hop.nvlink/Simpel": 1.0})


@pytest.mark.parametrize("part", PARTS)
def test_a_file_gives_back_what_was_written(part, tmp_path):
    rng = np.random.default_rng(0)
    constants = {}
    for name in names(part):
        value = float(rng.uniform(0.1, 1.0)) * {"s": 1e-5, "B/s": 1e10, "B": 1e6, "": 1.0}[unit_of(part, name)]
        constants[name] = Constant(value, value / 1.2, value * 1.2)
    told = Provenance("2026-11-21", ('a "log".txt',), ("2.28.3",), 12, {"hop.net/LL": "no row feels it"})
    found = Calibration(**{part: constants}, provenance=told)
    loaded = fabrics.load(str(write(tmp_path, BASE + fabrics.calibration_text(found)))).calibration
    assert loaded is not None
    assert loaded.provenance == told
    kept = getattr(loaded, part)
    assert list(kept) == list(constants)
    for name, one in constants.items():
        assert (kept[name].value, kept[name].low, kept[name].high) == pytest.approx(
            (one.value, one.low, one.high), 1e-4
        )


def test_times_use_the_constants_of_their_own_machine():
    plain = fabrics.load("alps-gh200", nodes=2)
    slow = replace(plain, calibration=Calibration(nccl={"net_share.slingshot": exactly(0.46)}))
    request = Request("all_gather", 2.0**32)
    before = seconds(plain, request)
    # The file's own share is 0.92, and the network is all that counts at 4 GiB.
    assert seconds(slow, request) == pytest.approx(2 * before, rel=0.02)
    assert seconds(plain, request) == before  # nothing of the other machine stayed behind


def test_gloo_and_devices_use_their_own_parts():
    plain = fabrics.load("hgx-h100")
    group = Group(plain, plain.gpus)
    part = Calibration(
        gloo={"call.all_reduce": exactly(1.0)}, device={"matmul.bf16": exactly(0.5), "stream": exactly(0.4)}
    )
    mine = Group(replace(plain, calibration=part), plain.gpus)
    call = GLOO_COSTS.call["all_reduce"]
    assert (gloo_costs_of(mine).call["all_reduce"], gloo_costs_of(group).call["all_reduce"]) == (1.0, call)
    assert flat(costs_of(mine)) == flat(costs_of(group))
    request = Request("all_reduce", 8.0)
    assert seconds(mine.topology, request, "gloo") == pytest.approx(seconds(plain, request, "gloo") + 1.0 - call)
    gpu = device("H100-SXM5-80GB")
    changed = with_efficiencies(gpu, part.values("device"))
    assert changed.matmul_rate("bf16") == pytest.approx(0.5 * gpu.peak["bf16"])
    assert changed.stream_rate() == pytest.approx(0.4 * gpu.memory_bandwidth)
    assert changed.matmul["fp16"] == gpu.matmul["fp16"]


def test_a_file_inherits_the_constants_of_the_one_it_extends(tmp_path):
    write(tmp_path, BASE + '[calibration.nccl]\nbase = { value = "4 us" }\nrooted_base = { value = "6 us" }\n')
    over = tmp_path / "over.toml"
    over.write_text('name = "over"\nextends = "mine.toml"\n[calibration.nccl]\nbase = { value = "5 us" }\n')
    loaded = fabrics.load(str(over)).calibration
    assert loaded is not None
    assert loaded.values("nccl") == {"base": pytest.approx(5e-6), "rooted_base": pytest.approx(6e-6)}
    over.write_text('name = "over"\nextends = "mine.toml"\n')
    below = fabrics.load(str(over)).calibration
    assert below is not None
    assert below.values("nccl")["base"] == pytest.approx(4e-6)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('[calibration.nccl]\n"hop.net/Simpel" = { value = "1 us" }', "did you mean 'hop.net/Simple'"),
        ("[calibration.nccl]\nbase = { value = 4.0 }", "'base'.value: 4.0 is a bare number where a time is needed"),
        ('[calibration.nccl]\ntree_share = { value = "1 us" }', "a share is a bare number"),
        ("[calibration.nccl]\ntree_share = { value = 0 }", "it must be above 0"),
        ('[calibration.gloo]\nstream = { value = "5 us" }', "as a bandwidth"),
        ("[calibration.nccl]\ntree_share = { value = 0.5, low = 0.6 }", "does not hold the value 0.5"),
        ("[calibration.nccl]\ntree_share = { valeu = 0.5 }", "did you mean 'value'"),
        ("[calibration.ncl]\ntree_share = { value = 0.5 }", "did you mean 'nccl'"),
    ],
)
def test_a_mistake_in_the_table_is_one_clear_error(table, says, tmp_path):
    path = write(tmp_path, BASE + table + "\n")
    with pytest.raises(TopologyError, match=str(path)) as caught:
        fabrics.load(str(path))
    assert says in str(caught.value)
    assert "calibration" in str(caught.value)


def test_a_saved_run_keeps_the_constants(tmp_path):
    from clustersim.files.traces import saved

    plain = fabrics.load("hgx-h100")
    part = Calibration(nccl={"base": exactly(4e-6)}, provenance=Provenance("2026-11-21", refused={"tree_share": "no"}))
    arrays: dict[str, np.ndarray] = {}
    words = saved._topology_words(replace(plain, calibration=part), arrays)
    back = saved._topology(words, arrays).calibration
    assert back is not None
    assert (dict(back.nccl), back.provenance) == (dict(part.nccl), part.provenance)
