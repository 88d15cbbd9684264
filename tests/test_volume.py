"""What a step moves: the algorithms' closed forms, summed over ops, and what links carry of it."""

from __future__ import annotations

import re

import numpy as np
import pytest
import toy

import clustersim
from clustersim.cluster import files as fabrics
from clustersim.core.byte_matrix import byte_matrix
from clustersim.core.program import Collective
from clustersim.engine import simulate
from clustersim.explain.explain import explain
from clustersim.explain.volume import volume


def run(scenario: str, **changes: object):
    return clustersim.load(scenario, {key.replace("__", "."): value for key, value in changes.items()}).run()


def by_op(result) -> dict[str, dict[str, float]]:
    table = result.volume
    return {str(op): {name: column[i] for name, column in table.items()} for i, op in enumerate(table["op"])}


def test_ddp_on_a_ring_sends_twice_the_gradients_less_one_part():
    result = run("ddp_resnet50_1x8_v100")
    z = result.prepared.model.parameters * 4
    rows = by_op(result)
    assert rows["all_reduce"]["sent"] == pytest.approx(8 * 2 * 7 / 8 * z)
    assert rows["all_reduce"]["received"] == rows["all_reduce"]["sent"]
    total = sum(row["sent"] for row in rows.values()) / 8
    assert total == pytest.approx(result.summary["bytes_sent_per_gpu"])


@pytest.mark.parametrize(("algorithm", "factor"), [("ring_unsplit", 7.0), ("direct", 7.0), ("tree", 2 * 7 / 8)])
def test_a_pinned_algorithm_sends_its_own_volume(algorithm, factor):
    result = run("ddp_resnet50_1x8_v100", strategy__algorithm=algorithm, strategy__broadcast_buffers=False)
    z = result.prepared.model.parameters * 4
    assert result.summary["bytes_sent_per_gpu"] == pytest.approx(factor * z)


def test_a_parameter_server_takes_and_gives_every_workers_gradients():
    result = run("ps_sync_cpu_1x8")
    z = result.prepared.model.parameters * 4
    rows = by_op(result)
    for op in ("push", "pull"):
        assert rows[op]["sent"] == rows[op]["received"] == pytest.approx(8 * z)
    assert (rows["pull request"]["count"], rows["pull request"]["ranks"]) == (1, 8)
    assert (rows["pull"]["count"], rows["pull"]["ranks"]) == (rows["push"]["count"], rows["push"]["ranks"])


def test_payload_on_links_is_what_was_sent_where_each_transfer_takes_one_link_of_a_kind():
    """One GPU per node: what a ring sends crosses the network once out of, and once into, each NIC; the share of the
    line rate the transport reaches makes it more."""
    result = run("ddp_gpt2_xl_2x8_a100", cluster__gpus_per_node=1, run__fidelity="flow", run__steps=2)
    row = by_op(result)["all_reduce"]
    share = row["sent"] / row["link_net"]
    assert 0.4 < share <= 0.5


def test_switches_that_add_take_everything_and_give_everything():
    h100 = {"cluster__topology": "hgx-h100", "cluster__device": "H100-SXM5-80GB", "cluster__nodes": 1}
    result = run("ddp_gpt2_xl_2x8_a100", **h100, strategy__algorithm="nvls", strategy__broadcast_buffers=False)
    z = result.prepared.model.parameters * 4
    assert result.summary["bytes_sent_per_gpu"] == pytest.approx((1 + 1 / 8) * z)


def test_steps_that_were_not_asked_for_do_not_count():
    result = run("ddp_resnet50_1x8_v100", run__steps=3)
    one = volume(result.timeline, [2])
    all_three = volume(result.timeline, [0, 1, 2])
    assert np.all(one["op"] == all_three["op"])
    assert one["sent"].sum() > 0
    assert volume(result.timeline, [7])["op"].tolist() == []


def test_a_message_between_stages_is_one_row_sent_and_received_and_crosses_its_links_once():
    result = run("1f1b_gpt2_xl_1x8_a100", run__steps=1)
    rows = by_op(result)
    assert "recv" not in rows
    assert rows["send"]["sent"] == rows["send"]["received"] > 0
    (messages,) = np.flatnonzero(result.volume_by_dimension["dimension"] == "PP")
    assert rows["send"]["link_nvlink"] == pytest.approx(result.volume_by_dimension["link_nvlink"][messages])


def test_an_uneven_all_to_all_sends_what_its_byte_matrix_says():
    pairs = 0.25 * np.eye(8) + 0.5 * np.roll(np.eye(8), 1, axis=1)  # half of S to the next, a quarter stays
    op = Collective("a2a", "all_to_all", 12.0, np.arange(8)[None], matrix=byte_matrix(pairs.tolist()))
    topology = fabrics.load("hgx-h100", nodes=1)
    timeline = simulate(toy.program([op], ranks=8), topology, fabrics.mesh(topology))
    table = volume(timeline, [0])
    assert table["sent"].tolist() == table["received"].tolist() == pytest.approx([8 * 0.5 * 12.0])


def test_calls_are_counted_as_one_rank_makes_them_whatever_the_number_of_stages():
    """Each stage has its own op for what all ranks do once, and a message is an op at both of its ends."""
    result = run("1f1b_gpt2_xl_1x8_a100")
    rows = by_op(result)
    ops = result.timeline.ops
    step = result.summary["steady_steps"][0]
    spans = result.timeline.spans()
    of_step = [
        (rank, ops[op])
        for rank, op in zip(spans["rank"].tolist(), spans["op"].tolist(), strict=True)
        if ops[op].step == step
    ]
    for kind in ("send", "all_reduce"):
        calls = [rank for rank, op in of_step if op.kind == kind]
        assert rows[kind]["ranks"] == len(set(calls))
        assert rows[kind]["count"] == pytest.approx(len(calls) / len(set(calls)))


def test_messages_that_latency_holds_are_counted_on_one_rank():
    result = run("1f1b_gpt2_xl_1x8_a100", model__seq_len=64)
    texts = [text for text in explain(result.timeline).causes if "Messages like" in text]
    rank, count = (int(n) for n in re.search(r"Rank (\d+) has (\d+) of them a step", texts[0]).groups())
    ops = result.timeline.ops
    step = result.summary["steady_steps"][0]
    own = [ops[op] for op in result.timeline.spans([rank])["op"].tolist() if ops[op].step == step]
    assert count == sum(op.kind in {"send", "recv"} for op in own)
