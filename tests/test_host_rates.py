"""How fast GPUs copy to their hosts: by the machine's own links, shared by whoever shares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim import scenario
from clustersim.cluster import files as fabrics
from clustersim.collectives import plan
from clustersim.collectives.base import Group, Request
from clustersim.collectives.host_copies import C2C_SHARE_FROM_HOST, C2C_SHARE_TO_HOST, COPY_SHARE
from clustersim.core.errors import ScenarioError
from clustersim.core.memory_rates import REMOTE_SHARE, THREAD_RATE, host_bandwidth
from clustersim.core.program import Compute
from clustersim.core.units import format_bytes
from clustersim.explain.volume import host_copies
from clustersim.scenario.run.hosts import host_copy_rates

NAME = "zero3_llama3_8b_2x8_a100"
AWAY = {
    "strategy.zero_optimization.offload_optimizer.device": "cpu",
    "strategy.zero_optimization.offload_optimizer.pin_memory": True,
}


def rates(name: str, nodes: int = 1, per_node: int | None = None) -> tuple[float, float]:
    """To the host and from it."""
    topology = fabrics.load(name, nodes=nodes)
    return host_copy_rates(topology, fabrics.mesh(topology, nproc_per_node=per_node))


def test_a_gpu_with_an_up_link_of_its_own_has_it_to_itself_and_two_behind_a_switch_have_half():
    assert rates("hgx-h100") == pytest.approx((COPY_SHARE * 63e9,) * 2)
    assert rates("hgx-a100") == pytest.approx((COPY_SHARE * 31.5e9 / 2,) * 2)
    assert rates("pcie-a100") == pytest.approx((COPY_SHARE * 31.5e9 / 4,) * 2)
    assert rates("pcie-a100", per_node=1) == pytest.approx((COPY_SHARE * 31.5e9,) * 2)


def test_a_chip_to_chip_link_is_as_fast_as_it_was_measured_each_way():
    assert rates("alps-gh200") == pytest.approx((C2C_SHARE_TO_HOST * 450e9, C2C_SHARE_FROM_HOST * 450e9))
    assert rates("gb200-nvl72", nodes=18)[1] == pytest.approx(C2C_SHARE_FROM_HOST * 225e9)


def test_gpus_of_one_socket_share_its_memory():
    topology = fabrics.load("aws-p5", nodes=1)
    memory = host_bandwidth(topology.node_types[0])
    assert memory / 4 < COPY_SHARE * 63e9
    assert rates("aws-p5") == pytest.approx((memory / 4,) * 2)


def test_a_step_waits_for_the_node_whose_links_are_slowest():
    whole = rates("hgx-h100", nodes=3)
    topology = fabrics.load("hgx-h100", nodes=3)
    slower = fabrics.change(topology, fabrics.Change("node2/gpu5 -> node2/pcie5", 0.5))
    assert host_copy_rates(slower, fabrics.mesh(slower))[0] == pytest.approx(whole[0] / 2)


def test_the_rate_is_that_of_a_copy_by_itself_where_nothing_is_shared():
    topology = fabrics.load("alps-gh200", nodes=1)
    for ends, rate in zip((("gpu2", "cpu2"), ("cpu2", "gpu2")), rates("alps-gh200"), strict=True):
        pair = Group(topology, np.array([topology.vertex(f"node0/{end}") for end in ends]))
        took = plan(Request("send", 1e10), pair).time(topology.link_bandwidth)
        assert 1e10 / took == pytest.approx(rate, rel=2e-3)


def copies(changes: dict[str, Any]) -> list[Compute]:
    """A rank's copies in a step with its optimizer on the host."""
    made = scenario.load(NAME, {**AWAY, **changes}).prepare()
    return [op for op in made.program.roles[0].ops if isinstance(op, Compute) and op.phase == "memcpy"]


def test_a_run_says_what_its_gpus_copy_to_their_hosts_and_back():
    """No collective and no link has it; of stage 3 a GPU sends each element it owns in 16 bits and in 32, and gets its
    gradient and its parameter back."""
    run = scenario.load(NAME, {**AWAY, "model.options": {"layers": 2}}).run()
    own = run.prepared.model.parameters
    to_host, from_host = host_copies(run.timeline, run.summary["steady_steps"])
    assert to_host == pytest.approx(6 * own, rel=1e-3)
    assert from_host == pytest.approx(4 * own, rel=1e-3)
    (note,) = [note for note in run.notes if note.startswith("copied in a step beside collectives")]
    assert f"{format_bytes(to_host)} to hosts and {format_bytes(from_host)} from them" in note
    assert f"of each GPU {format_bytes(to_host / 16)} and {format_bytes(from_host / 16)}, at 3.6 to 13.9 GB/s" in note
    plain = scenario.load(NAME, {"model.options": {"layers": 2}}).run()
    assert not any("beside collectives" in note for note in plain.notes)


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({}, COPY_SHARE * 31.5e9 / 2),
        ({"cluster.topology": "hgx-h100"}, COPY_SHARE * 63e9),
        ({"strategy.pcie_bandwidth": "20 GB/s"}, 20e9),
    ],
)
def test_an_offload_copies_at_the_machines_rate_or_at_the_one_that_is_given(changes, rate):
    ops = copies(changes)
    assert ops
    assert all(op.nbytes / op.duration == pytest.approx(rate) for op in ops if op.name != "h2d parameters")


def test_memory_that_is_not_page_locked_is_as_fast_as_a_thread_moves_it():
    key = "strategy.zero_optimization.offload_optimizer.pin_memory"
    rate = THREAD_RATE * REMOTE_SHARE / 2  # of two reads and writes of a byte, of several ranks the slowest's
    assert all(op.nbytes / op.duration == pytest.approx(rate) for op in copies({key: False}))
    own = copies({key: False, "strategy.pcie_bandwidth": "2 GB/s"})
    assert all(op.nbytes / op.duration == pytest.approx(2e9) for op in own)


def test_a_machine_whose_file_has_no_cpu_is_asked_for_the_rate(tmp_path: Path):
    path = tmp_path / "bare.toml"
    path.write_text('name = "bare"\nextends = "hgx-a100"\n[node]\nremove = ["cpu*"]\n', encoding="utf-8")
    changes = {**AWAY, "cluster.topology": str(path), "cluster.nodes": 1}
    with pytest.raises(ScenarioError, match=r"no CPU that node0/gpu0 reaches.*strategy.pcie_bandwidth"):
        scenario.load(NAME, changes).prepare()
    scenario.load(NAME, {**changes, "strategy.pcie_bandwidth": "10 GB/s"}).prepare()
