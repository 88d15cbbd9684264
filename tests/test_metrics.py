"""Figures of a run against timelines small enough to add up by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from player import link_use, play, toy_cost, toy_model

from clustersim import load
from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.timeline import LinkUse, OpInfo, Timeline, alike
from clustersim.explain.metrics import hottest_links, summary, warm_up
from clustersim.explain.occupancy import occupancy
from clustersim.training.strategies.ddp import DDPConfig, build

MIB = 2**20


def timeline_of(world, spans, links=None):
    """spans: (kind, phase, stream, step, ranks, ready, start, end)."""
    ops = [
        OpInfo(
            f"{kind} {i}",
            kind,
            stream,
            phase,
            nbytes=8.0,
            flops=5e12 * (kind == "compute"),
            step=step,
            detail={"group_size": world},
        )
        for i, (kind, phase, stream, step, *_) in enumerate(spans)
    ]
    times = np.array([s[5:] for s in spans], dtype=float)
    order = np.arange(len(spans))
    return Timeline(world, tuple(ops), tuple(np.array(s[4]) for s in spans), order, order, *times.T, links=links)


def test_exposed_communication_is_what_compute_idles_through_waiting_included():
    timeline = timeline_of(
        2,
        [
            ("compute", "forward", "compute", 0, [0], 0, 0, 4),
            ("compute", "forward", "compute", 0, [1], 0, 0, 6),
            ("all_reduce", "communication", "comm", 0, [0], 2, 3, 7),  # ranks need not be consistent here
            ("all_reduce", "communication", "comm", 0, [1], 3, 3, 7),
            ("compute", "optimizer", "compute", 0, [0, 1], 7, 7, 10),
        ],
    )
    result = summary(timeline, toy_model([[4]], seq_len=100), samples_per_step=6, peak=(1e13, "bf16 dense"))
    assert result["step_time_s"] == 10
    assert result["steady_steps"] == [0]
    assert result["per_rank"]["exposed_communication_s"].tolist() == [3, 1]
    assert result["per_rank"]["peer_wait_s"].tolist() == [1, 0]
    assert result["per_rank"]["communication_s"].tolist() == [4, 4]
    assert result["per_rank"]["compute_s"].tolist() == [7, 9]
    assert (result["exposed_communication_s"], result["compute_s"], result["idle_s"]) == (2, 8, 0)
    assert result["samples_per_s"] == 0.6
    assert result["tokens_per_s_per_gpu"] == 30
    assert result["mfu"] == pytest.approx(3e9 * 0.3 / 1e13)
    assert result["hfu"] == pytest.approx((1 + 1 + 2) * 5e12 / 2 / 10 / 1e13)
    assert result["bytes_sent_per_gpu"] == 8.0  # 2 (n-1)/n S
    assert sum(result["phase_shares"].values()) == pytest.approx(1)
    assert result["phase_shares"]["forward"] == 0.5


def test_images_have_no_tokens_and_no_peak_means_no_mfu():
    timeline = timeline_of(1, [("compute", "forward", "compute", 0, [0], 0, 0, 4)])
    result = summary(timeline, toy_model([[4]]), samples_per_step=1)
    assert result["tokens_per_s_per_gpu"] is result["mfu"] is result["hfu"] is None


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "jasper"])
def test_only_text_is_counted_in_tokens(name):
    """A clip's frames were told as tokens per second: Jasper had 93,912 of them a GPU."""
    over = {"cluster.nodes": 1, "model.name": name, "model.seq_len": None}
    figures = load("ddp_gpt2_xl_2x8_a100", over).run().summary
    assert figures["tokens_per_s_per_gpu"] is None
    assert figures["samples_per_s"] > 0
    assert load("ddp_gpt2_xl_2x8_a100", {"cluster.nodes": 1}).run().summary["tokens_per_s_per_gpu"] > 0


@pytest.mark.parametrize(("n_steps", "steady", "seconds"), [(1, [0], 9), (2, [1], 5), (3, [2], 4), (5, [2, 3, 4], 4)])
def test_the_steady_state_leaves_out_the_first_bucket_and_the_rebuild(n_steps, steady, seconds):
    ends = np.cumsum([9, 5, 4, 4, 4])[:n_steps].tolist()
    begins = [0, *ends[:-1]]
    spans = [
        ("compute", "forward", "compute", s, [0], b, b, e) for s, (b, e) in enumerate(zip(begins, ends, strict=True))
    ]
    result = summary(timeline_of(1, spans), toy_model([[4]]), samples_per_step=1)
    assert (result["steady_steps"], result["step_time_s"], result["first_step_s"]) == (steady, seconds, 9)


def test_an_empty_timeline_is_an_error():
    empty = timeline_of(1, [("compute", "forward", "compute", 0, [0], 0, 0, 4)])
    none = {name: getattr(empty, name)[:0] for name in ("row_op", "row_set", "row_ready", "row_start", "row_end")}
    with pytest.raises(ProgramError, match="empty"):
        summary(replace(empty, **none), toy_model([[4]]), samples_per_step=1)


INTERVAL = st.tuples(st.integers(0, 30), st.integers(0, 10), st.integers(0, 10))


KINDS = (
    ("all_gather", "communication", "comm"),
    ("compute", "other", "compute"),
    ("compute", "other", "hook"),
    ("compute", "memcpy", "copies"),
    ("compute", "input", "compute"),
)
"""A transfer, a kernel, a kernel of another stream, what the host does, and what it does where kernels would run."""


@given(spans=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2), INTERVAL), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_occupancy_equals_counting_every_instant(spans):
    rows = []
    for how, rank, (ready, wait, length) in spans:
        rows.append((*how, 0, [rank], ready, ready + wait, ready + wait + length))
    got = occupancy(timeline_of(3, rows), np.arange(3))
    for rank in range(3):
        compute, transfer, active, host, loads = (np.zeros(60, bool) for _ in range(5))
        for kind, phase, *_, (mine,), ready, start, end in rows:
            if mine == rank and kind == "compute":
                (host if phase == "memcpy" else compute)[start:end] = True
                loads[start:end] |= phase == "input"
            elif mine == rank:
                transfer[start:end] = True
                active[ready:end] = True
        counted = [compute, transfer, active & ~transfer, active & ~compute, transfer & ~compute]
        counted += [host & ~active & ~compute, loads]
        assert [column[rank] for column in got.values()] == [state.sum() for state in counted]


def test_ranks_that_behave_alike_are_found_and_expanded_again():
    spans = [
        ("compute", "forward", "compute", 0, [0, 1, 2, 3, 4], 0, 0, 1),
        ("compute", "forward", "compute", 0, [1, 3], 1, 1, 2),
        ("compute", "forward", "compute", 0, [0, 2, 4], 1, 1, 4),
        ("compute", "forward", "compute", 0, [4], 4, 4, 5),
    ]
    timeline = timeline_of(5, spans)
    representatives, class_of = alike(timeline)
    assert representatives.tolist() == [0, 1, 4]
    assert class_of.tolist() == [0, 1, 0, 1, 2]
    result = summary(timeline, toy_model([[4]]), samples_per_step=1)
    assert result["per_rank"]["compute_s"].tolist() == [4, 2, 4, 2, 5]


def test_links_that_carry_as_much_but_for_rounding_are_in_order_of_their_ids():
    loads = ((np.array([0, 1, 2]), np.array([1.0, np.nextafter(1.0, 2.0), 1.0 + 1e-6])),)
    use = LinkUse(
        *(np.array(column) for column in ([0], [0.0], [1.0], [1.0], [0], [0])), loads, ("a", "b", "c"), np.ones(3)
    )
    assert [name for name, _, _ in hottest_links(use, 0.0, 1.0, 3)] == ["c", "a", "b"]


def test_the_hottest_links_are_counted_inside_the_window_only():
    use = link_use([(0, 0.0, 4.0, 5.0), (1, 3.0, 5.0, 4.0)])
    assert hottest_links(use, 0.0, 5.0, 9) == [("a -> b", 0.4, 20.0), ("b -> c", 0.36, 36.0)]
    assert hottest_links(use, 3.5, 4.0, 1) == [("b -> c", pytest.approx(13 / 20), 6.5)]
    assert hottest_links(None, 0.0, 5.0, 3) == []


def test_ddp_hides_communication_that_fits_under_backward():
    model = toy_model([[2 * MIB]] * 6)
    cost = toy_cost(model, per_tensor=0.0, grad_copy_bandwidth=1e15)
    config = DDPConfig(bucket_cap_mb=8, gradient_as_bucket_view=True)
    program = build(model, cost, Mesh(np.arange(8), 8), config, 4, 0)
    result = summary(play(program, lambda op: 1e-3), model, samples_per_step=8)
    assert result["step_time_s"] == pytest.approx(6 * 3e-3 + 1e-3 + 5e-4)
    assert result["communication_s"] == pytest.approx(6e-3)
    assert result["exposed_communication_s"] == pytest.approx(1e-3)
    assert result["bytes_sent_per_gpu"] == pytest.approx(2 * 7 / 8 * model.parameters * 4)
    assert result["first_step_s"] == pytest.approx(6 * 3e-3 + 1e-3 + 5e-4)


@pytest.mark.parametrize("jitter", [0.0, 0.05])
def test_no_state_of_a_rank_exceeds_its_step(jitter):
    model = toy_model([[2 * MIB]] * 6)
    program = build(model, toy_cost(model, jitter=jitter), Mesh(np.arange(16), 8), DDPConfig(), 5, 3)
    result = summary(play(program, lambda op: 3e-3), model, samples_per_step=16)
    for name, column in result["per_rank"].items():
        if name != "rank":
            assert (column >= 0).all()
            assert (column <= result["step_time_s"] * (1 + 5 * jitter / 3) + 1e-12).all()
    assert sum(result["phase_shares"].values()) == pytest.approx(1, abs=0.02)
    assert (result["peer_wait_s"] > 0) == (jitter > 0)


@pytest.mark.parametrize(("seconds", "warm"), [([], 0), ([1.0], 0), ([3.0, 1.0, 1.0], 1), ([1.0, 1.0, 3.0], 0)])
def test_leading_long_steps_of_a_measured_run_are_its_warm_up(seconds, warm):
    assert warm_up(seconds) == warm


def test_a_busy_links_bytes_are_a_steps_whatever_steps_were_played():
    """A link at 19.5 % of 25 GB/s was told to carry two steps' bytes beside a table of one step's."""
    for steps in (2, 4):
        result = load("ddp_gpt2_xl_2x8_a100", {"run.steps": steps, "run.jitter": 0.0}).run()
        use = result.timeline.links
        name, utilisation, nbytes = result.summary["hottest_links"][0]
        bandwidth = use.link_bandwidth[use.link_names.index(name)]
        assert nbytes == pytest.approx(utilisation * bandwidth * result.summary["step_time_s"])


def test_an_mfu_that_counts_what_a_causal_mask_skips_says_so():
    # GPT-2 on an A100: attention is 12 L h s^2 of a sample's FLOPs in PaLM's count, half of it behind the mask.
    run = load("single_gpt2_1x1_a100", {"model.seq_len": 1024}).run()
    masked = 0.5 * 12 * 12 * 768 * 1024**2 / run.prepared.model.flops_per_sample()
    (note,) = [note for note in run.notes if note.startswith("MFU counts attention's square whole")]
    assert note.endswith(f"MFU is {run.summary['mfu'] * (1 - masked):.1%}")
    assert not any("causal" in note for note in load("ddp_resnet50_1x8_v100", {"run.steps": 3}).run().notes)
