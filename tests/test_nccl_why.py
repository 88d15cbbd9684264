"""``collective --why``: what else NCCL could run, and why it does not."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from clustersim.app.cli import cli
from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group, Request
from clustersim.collectives.nccl_backend import plan
from clustersim.collectives.nccl_why import Alternative, why


def group(name: str, nodes: int) -> Group:
    topology = fabrics.load(name, nodes=nodes)
    return Group(topology, fabrics.mesh(topology).gpus)


def by_pair(found: tuple[Alternative, ...]) -> dict[tuple[str, str], Alternative]:
    return {(one.algorithm, one.protocol): one for one in found}


@pytest.mark.parametrize("nbytes", [8.0, 2.0**20, 2.0**30])
@pytest.mark.parametrize("name", ["hgx-h100", "hgx-a100", "pcie-a100"])
def test_what_is_chosen_has_the_least_of_nccls_own_times_and_the_predicted_one(name, nbytes):
    request, on = Request("all_reduce", nbytes), group(name, 2)
    found = why(request, on)
    (chosen,) = (one for one in found if one.verdict == "chosen")
    made = plan(request, on)
    assert (chosen.algorithm, chosen.protocol) == (made.algorithm, made.protocol)
    assert chosen.ours_us == pytest.approx(made.time(on.topology.link_bandwidth) * 1e6)
    for one in found:
        if one.tuner_us is None:
            assert one.verdict.startswith("not possible: ")
        elif one.verdict.startswith("slower"):
            assert one.tuner_us > chosen.tuner_us


def test_a_setting_or_a_vendor_that_leaves_something_out_is_named():
    pinned = by_pair(why(Request("all_reduce", 2.0**20, algorithm="ring"), group("hgx-h100", 2)))
    assert "asked for (ring)" in pinned["tree", "LL"].verdict
    vendor = by_pair(why(Request("all_reduce", 2.0**20), group("gcp-a3-high", 2)))
    assert "vendor" in vendor["ring", "LL"].verdict


def test_sends_and_algorithms_of_others_have_one_way():
    assert len(why(Request("all_to_all", 2.0**20), group("hgx-h100", 1))) == 1
    assert len(why(Request("all_reduce", 2.0**20, algorithm="hierarchical"), group("hgx-h100", 2))) == 1


def test_the_command_prints_them_and_refuses_another_library():
    asked = ["collective", "all_reduce", "--topology", "hgx-h100", "--size", "1MiB", "--why"]
    said = CliRunner().invoke(cli, asked)
    assert said.exit_code == 0
    assert "NCCL says" in said.output
    rows = json.loads(CliRunner().invoke(cli, [*asked, "--json"]).output)["rows"]
    assert sum(one["verdict"] == "chosen" for one in rows[0]["alternatives"]) == 1
    refused = CliRunner().invoke(cli, [*asked, "--backend", "gloo"])
    assert refused.exit_code != 0
