"""What is told of parameter servers over a network, against bytes over bandwidth added up by hand."""

from __future__ import annotations

import pytest

from clustersim import load
from clustersim.explain.critical_path import critical_path
from clustersim.explain.transfers import transfer_facts

OVER = {
    "cluster.topology": "hgx-v100-4gpu-10g",
    "cluster.nodes": 4,
    "model.name": "alexnet",
    "strategy.micro_batch_size": 1,
    "run.backend": "ideal",
    "run.steps": 3,
}
NIC = 1.25e9
"""10 Gb/s, of a machine of four GPUs."""


def played(**strategy):
    """Of 16 GPUs on four machines, and the bytes of all parameters."""
    result = load("why_parameter_server", OVER | {f"strategy.{key}": value for key, value in strategy.items()}).run()
    return result, 4.0 * result.prepared.model.parameters


@pytest.fixture(scope="module")
def dedicated():
    """One server on a GPU of its own: three workers are beside it on NVLink, twelve come through its NIC."""
    return played(server="gpu")


def test_twelve_workers_come_through_one_nic(dedicated):
    result, nbytes = dedicated
    assert result.summary["step_time_s"] == pytest.approx(2 * 12 * nbytes / NIC, rel=0.05)


def test_the_link_that_holds_the_workers_is_the_nic_and_not_the_nvlink_of_the_first_worker(dedicated):
    result, _ = dedicated
    path = critical_path(result.timeline)
    names = list(path.by_link)[:2]
    assert sorted(names) == ["leaf0 -> node0/nic0", "node0/nic0 -> leaf0"]
    assert sum(path.by_link[name] for name in names) > 0.9 * result.summary["step_time_s"]
    facts = transfer_facts(result.timeline)
    pulls = [i for i, op in enumerate(result.timeline.ops) if op.name.startswith("pull ") and op.nbytes > 1e7]
    held = [facts[i] for i in pulls if i in facts and "worker" not in result.timeline.ops[i].name]
    assert held
    assert all(fact.alone == pytest.approx(NIC, rel=0.01) for fact in held)
    assert all(fact.rate <= NIC / 11.9 for fact in held)


def test_a_servers_busiest_link_is_looked_for_on_its_whole_way(dedicated):
    """The server's own PCIe link was told, at 4 %, where its machine's NIC was in use half of the time each way."""
    result, _ = dedicated
    (server,) = result.to_dict()["of_strategy"]["servers"]
    assert server["link_use_in"] == pytest.approx(0.5, abs=0.05)
    assert server["link_use_out"] == pytest.approx(0.5, abs=0.05)


def test_a_server_in_a_worker_of_each_machine_shares_the_incast(dedicated):
    """Each NIC sends what its four workers push to three other machines, and what its server gives to twelve."""
    result, nbytes = played(server="worker", servers=4, sharding="even")
    assert result.summary["step_time_s"] == pytest.approx(2 * 12 * (nbytes / 4) / NIC, rel=0.1)
