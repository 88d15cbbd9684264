"""Experts over ranks: every worked example exactly, what is issued in which order, what is kept, and loads."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustersim import load
from clustersim.cluster import files as fabrics
from clustersim.core.errors import ScenarioError
from clustersim.core.model import Kernel, Model
from clustersim.core.texts import Table
from clustersim.model import model
from clustersim.training.parallel import ParallelConfig, Recompute, Routing
from clustersim.training.partition import expert
from clustersim.training.partition.base import Exchange, LocalLayer, Partition, Work
from clustersim.training.partition.routing import ExpertRouter, capacity, distinct, popularity, read_histogram, routed
from clustersim.training.partition.split import partition
from tests.tables import table_rows

EXAMPLES = Path(__file__).parent / "data" / "expert_examples.csv"
BALANCED = Routing(kind="balanced")


def rows(prefix: str) -> list[dict[str, str]]:
    return [row for row in table_rows(EXAMPLES) if row["id"].startswith(prefix)]


@cache
def shaped(name: str, **options: object) -> Model:
    return model(name, **options)


def expert_layer(
    name: str, seq_len: int = 4096, experts: dict[str, int] | None = None, **parallel: object
) -> LocalLayer:
    """A block with experts, routed evenly unless said otherwise; ``experts`` : sizes of them that are others."""
    others = {"experts": experts} if experts else {}
    made = model(name, seq_len=seq_len, layers=5, implementation="fused", **others)
    settings_ = {"routing": BALANCED, "dispatcher": "alltoall", "etp": 1} | parallel
    cut = partition(made, ParallelConfig(**settings_))  # type: ignore[arg-type]
    return next(layer for layer in reversed(cut.stages[0].layers) if layer.kind == "block" and layer.expert_tensors)


def exchanges(layer: LocalLayer, what: str, kind: str = "") -> list[Exchange]:
    every = [*layer.forward, *layer.backward]
    return [x for x in every if isinstance(x, Exchange) and x.name.startswith(what) and kind in {"", x.kind}]


def names(items: object) -> list[str]:
    return [item.name for item in items]  # type: ignore[attr-defined]


# ---- the worked examples --------------------------------------------------------------------------------------------


def of_example(row: dict[str, str]) -> LocalLayer:
    said = re.match(r"(\S+) ep=(\d+) attention t=(\d+)", row["config"])
    assert said
    extra: dict[str, object] = {}
    if "allgather" in row["config"]:
        extra = {"dispatcher": "allgather"}
    if "capacity factor" in row["config"]:
        extra = {"capacity_factor": 1.0, "pad_to_capacity": True}
    if "DeepEP" in row["config"]:
        extra = {"dispatcher": "flex"}
    ep = int(said.group(2))
    tp = int(said.group(3))
    return expert_layer(said.group(1), ep=ep, tp=tp, sequence_parallel=tp > 1, **extra)


def up_product(layer: LocalLayer) -> tuple[int, int]:
    """(rows of one expert, experts of a rank)."""
    work = next(w for w in layer.forward if isinstance(w, Work) and w.name == "experts")
    kernel = next(k for k in work.kernels if k.name == "expert_up")
    return kernel.m, kernel.repeat


def answer(row: dict[str, str]) -> str:
    layer = of_example(row)
    what = row["quantity"]
    ep = int(row["config"].split("ep=")[1].split()[0])
    if what.startswith("dispatch (=combine)"):
        there = exchanges(layer, "dispatch")[0]
        back = exchanges(layer, "combine")[0]
        assert there.elements == back.elements
        return f"{2 * there.elements:.0f}"
    if what.startswith("of which leaves"):
        return f"{2 * exchanges(layer, 'dispatch')[0].elements * (ep - 1) / ep:.0f}"
    if what.startswith("all-to-alls"):
        all_to_alls = exchanges(layer, "", "all_to_all")
        probs = [x for x in all_to_alls if "probs" in x.name]
        assert {f"{4 * x.elements:.0f} B each" for x in probs} == {re.findall(r"\d+ B each", what)[0]}
        return f"{len(all_to_alls) - len(probs)} ; {len(probs)}"
    if what.startswith("gathered hidden"):
        return f"{2 * next(x for x in exchanges(layer, 'dispatch') if x.name == 'dispatch').elements:.0f}"
    if what.startswith("tokens per local expert"):
        return str(up_product(layer)[0])
    if what.startswith("expert input rows"):
        return str(math.prod(up_product(layer)))
    if what.startswith("expected distinct nodes"):
        return f"{distinct(ep // 8, 256, 8):.4f}"
    assert what.startswith("expected distinct destination")
    hidden = 4096 if row["config"].startswith("mixtral") else 7168
    tokens = 4096 / int(row["config"].split(" t=")[1].split()[0])
    return f"{exchanges(layer, 'dispatch nvlink')[0].elements / (tokens * hidden):.4f}"


BYTES = [row for row in rows("ep_") if row["id"] not in {"ep_dsv3_limit", "ep_imb_random"}]


@pytest.mark.parametrize("row", BYTES, ids=lambda row: f"{row['id']} {row['quantity'][:40]}")
def test_every_example_row_is_met_exactly(row: dict[str, str]) -> None:
    assert answer(row) == row["value"]


def test_every_example_row_is_a_test() -> None:
    known = {"ep_", "mem_mixtral-8x7b", "mem_deepseek-v3", "flops_mixtral-8x7b", "flops_deepseek-v3"}
    assert all(any(row["id"].startswith(prefix) for prefix in known) for row in rows(""))
    assert len(BYTES) == 29


def test_v3_sends_a_token_to_four_nodes_at_most() -> None:
    (row,) = rows("ep_dsv3_limit")
    made = partition(
        shaped("deepseek-v3", seq_len=4096, layers=4),
        ParallelConfig(ep=64, etp=1, dispatcher="flex", routing=BALANCED),
        nproc_per_node=8,
    )
    layer = made.stages[0].layers[-2]
    away = exchanges(layer, "dispatch rdma")[0].elements / (4096 * 7168)
    assert away == pytest.approx(distinct(4, 128, 8) * 7 / 8)
    assert away * 8 / 7 <= float(row["value"])


def test_random_routing_is_as_uneven_as_sampled() -> None:
    """Means over seeds, of what the examples drew 50 and 10 times."""
    small, large = (float(row["value"]) for row in rows("ep_imb_random"))
    draws = [
        np.mean([routed(ExpertRouter(Routing(seed=seed), e, k, ep, tokens)).imbalance for seed in range(100)])
        for e, k, ep, tokens in ((8, 2, 8, 4096 / 8), (256, 8, 64, 8192 / 64))
    ]
    assert draws == pytest.approx([small, large], abs=0.006)


# ---- memory ---------------------------------------------------------------------------------------------------------

# Megatron's estimator divides all blocks evenly over stages.
ESTIMATED = {
    "mem_mixtral-8x7b_par": ("mixtral-8x7b", {"pp": 4, "ep": 8}, 8, 1),
    "mem_deepseek-v3_par": (
        "deepseek-v3",
        {"pp": 16, "ep": 64, "decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 2},
        128,
        2,
    ),
}


def fullest(cut: Partition, pp: int) -> tuple[float, float]:
    """Dense and expert parameters of the first stage, were all stages alike; corrections of scores not counted."""
    layers = [layer for stage in cut.stages for layer in stage.layers]
    ahead = sum(layer.parameters for layer in layers if layer.kind == "embedding")
    blocks = [layer for layer in layers if layer.kind == "block"]
    corrections = sum(t.numel for layer in blocks for t in layer.tensors if "correction" in t.name)
    final_norm = next(t.numel for layer in layers if layer.kind == "head" for t in layer.tensors if "norm" in t.name)
    dense = sum(layer.parameters for layer in blocks) - corrections + final_norm
    return ahead + dense / pp, sum(layer.expert_parameters for layer in blocks) / pp


@pytest.mark.parametrize("case", ESTIMATED)
def test_static_memory_is_megatrons_exactly(case: str) -> None:
    name, degrees, dp, edp = ESTIMATED[case]
    cut = partition(shaped(name), ParallelConfig(**degrees, etp=1, dispatcher="alltoall", routing=BALANCED))  # type: ignore[arg-type]
    dense, expert = fullest(cut, degrees["pp"])
    total, most, nbytes = (row["value"] for row in rows(case))
    assert f"{shaped(name).parameters / 1e9:.2f}" == total
    assert f"{(dense + expert) / 1e9:.4f}" == most
    assert dense * (6 + 12 / dp) + expert * (6 + 12 / edp) == float(nbytes)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3"])
def test_a_rank_alone_holds_the_model(name: str) -> None:
    total, most = (row["value"] for row in rows(f"mem_{name}") if "_par" not in row["id"])
    (stage,) = partition(shaped(name), ParallelConfig()).stages
    held = stage.parameters + stage.expert_parameters
    assert held == shaped(name).parameters
    assert (f"{held / 1e9:.2f}", f"{held / 1e9:.4f}") == (total, most)


@given(
    tp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 4, 8]),
    etp=st.sampled_from([1, 2]),
    name=st.sampled_from(["mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b", "qwen2-57b-a14b"]),
)
@settings(max_examples=25, deadline=None)
def test_expert_parameters_and_flops_of_all_ranks_add_up(tp: int, ep: int, etp: int, name: str) -> None:
    whole = shaped(name, seq_len=1024, layers=2)
    cut = partition(
        whole, ParallelConfig(tp=tp, ep=ep, etp=etp, sequence_parallel=tp > 1, dispatcher="alltoall", routing=BALANCED)
    )
    layer = cut.stages[0].layers[2]
    there = whole.layers[2]
    routed_tensors = [t for t in there.tensors if t.cut.startswith("expert")]
    split = [t for t in routed_tensors if t.cut != "expert"]
    mine = [t for t in layer.expert_tensors if t.cut != "expert"]
    assert sum(t.numel for t in mine) * ep * etp == sum(t.numel for t in split)
    flops = sum(k.flops for w in layer.forward if isinstance(w, Work) for k in w.kernels if k.cut.startswith("expert_"))
    # Of one sample each rank has 1/tp of the tokens; all positions together compute tp ranks' tokens each.
    assert flops * tp == pytest.approx(sum(k.flops for k in there.kernels if k.cut.startswith("expert_")))


def test_a_mixture_keeps_what_its_received_rows_need() -> None:
    """Permuted input, FC1's two halves and the activation, whose rows are weighted: T'k h + 3 T'k f elements."""
    wide, narrow = (expert_layer("mixtral-8x7b", ep=ep, tp=2, sequence_parallel=True) for ep in (8, 2))
    work = {k.name: k for w in wide.forward if isinstance(w, Work) for k in w.kernels}
    tokens = 2048 * 2
    h = 4096
    f = 14336
    kept = sum(k.saved for k in work.values() if k.cut.startswith("expert"))
    assert kept == tokens * (h + 3 * f)
    assert wide.kept + wide.kept_for_weights == narrow.kept + narrow.kept_for_weights


@pytest.mark.parametrize(("framework", "passes", "launched"), [("megatron", 8, 2), ("torchtitan", 5, 1)])
def test_megatron_reads_gate_up_and_gradient_again_for_the_gradient_of_an_experts_weight(
    framework: str, passes: int, launched: int
) -> None:
    """Megatron-LM core/fusions/fused_bias_swiglu.py, ``weighted_swiglu_back``: 2 of gate and up and 1 of the gradient
    are read and 2 written for the one, 3 read for the other."""
    layer = expert_layer("mixtral-8x7b", ep=8, framework=framework)
    work = {k.name: k for w in layer.forward if isinstance(w, Work) for k in w.kernels}
    activation = work["expert_activation"]
    elements = 4096 * 2 * 14336
    assert activation.nbytes == pytest.approx(3 * elements)
    assert activation.backward_nbytes == pytest.approx(passes * elements)
    assert activation.backward_launches == launched


# ---- what is issued -------------------------------------------------------------------------------------------------


def test_all_to_all_is_issued_in_megatrons_order() -> None:
    layer = expert_layer("mixtral-8x7b", ep=4, tp=2, etp=2, sequence_parallel=True, permute_fusion=True)
    start = names(layer.forward).index("tokens per expert")
    assert names(layer.forward[start:]) == [
        "tokens per expert",
        "permute",
        "read counts",
        "dispatch",
        "dispatch probs",
        "dispatch over etp",
        "dispatch probs over etp",
        "experts",
        "combine over etp",
        "combine",
        "unpermute+moe",
    ]
    experts = layer.forward[start + 7]
    assert isinstance(experts, Work)
    order = [k.name for k in experts.kernels]
    assert (order[0], order[-1]) == ("sort_rows", "unsort_rows")
    counts = layer.forward[start]
    assert isinstance(counts, Exchange)
    assert (counts.dims, counts.dtype, counts.per_sample, counts.elements) == (("etp", "ep"), "int64", False, 8 * 8)


def test_rows_that_vary_or_that_a_mask_picks_are_counted_ahead_of_their_permutation() -> None:
    """Megatron-LM's before_permutation_1 and before_ep_alltoall, and masked_select of its permutation op by op."""
    fused = {"permute_fusion": True}
    for settings_, first in (
        (fused, "permute"),
        ({"framework": "torchtitan"}, "permute"),
        ({}, "read counts"),
        ({"router_padding": True, **fused}, "read counts"),
        ({"capacity_factor": 1.0, **fused}, "read counts"),
    ):
        order = names(expert_layer("mixtral-8x7b", ep=4, **settings_).forward)
        assert order[order.index("tokens per expert") + 1] == first
        assert order.index("read counts") < order.index("dispatch")


def test_a_router_in_fp32_moves_wide_gradients() -> None:
    narrow, wide = (expert_layer("mixtral-8x7b", ep=4, router_dtype=dtype) for dtype in (None, "fp32"))
    casts = [
        k
        for layer in (narrow, wide)
        for w in layer.backward
        for k in getattr(w, "kernels", ())
        if k.name == "router_casts"
    ]
    assert len(casts) == 1
    assert casts[0].backward_nbytes == 8 * 4096 * 4096
    assert narrow.kept == wide.kept


def test_the_all_gather_dispatcher_moves_every_token_whatever_k() -> None:
    layer = expert_layer("mixtral-8x7b", ep=8, dispatcher="allgather")
    found = Counter((x.kind, x.part) for x in exchanges(layer, "") if x.dims == ("etp", "ep"))
    assert found == {
        ("all_gather", "F"): 3,
        ("reduce_scatter", "F"): 1,
        ("all_gather", "I"): 1,
        ("reduce_scatter", "I"): 2,
    }


def test_recomputing_the_mixture_repeats_both_all_to_alls() -> None:
    made = shaped("mixtral-8x7b", seq_len=4096, layers=2)
    parallel = ParallelConfig(ep=8, etp=1, dispatcher="alltoall", routing=BALANCED)
    again = Recompute(granularity="selective", modules=("moe",))
    plain, repeated = (partition(made, parallel, r).stages[0].layers[1] for r in (Recompute(), again))
    hidden = [sum("probs" not in x.name for x in exchanges(layer, "", "all_to_all")) for layer in (plain, repeated)]
    assert hidden == [4, 6]
    assert repeated.kept + repeated.kept_for_weights < plain.kept + plain.kept_for_weights
    assert repeated.repeated > 0


def test_an_activation_computed_again_keeps_the_rows_but_not_its_output() -> None:
    made = shaped("mixtral-8x7b", seq_len=4096, layers=2, implementation="fused")
    parallel = ParallelConfig(ep=8, etp=1, dispatcher="alltoall", routing=BALANCED)
    again = Recompute(granularity="selective", modules=("moe_act",))
    plain, repeated = (partition(made, parallel, r).stages[0].layers[1] for r in (Recompute(), again))
    assert plain.kept_for_weights - repeated.kept_for_weights == repeated.repeated == 4096 * 2 * 14336
    assert [x.part for x in repeated.backward if isinstance(x, Work)].count("R") == 1


def kernels_of(layer: LocalLayer, part: str) -> list[Kernel]:
    return [k for x in (*layer.forward, *layer.backward) if isinstance(x, Work) and x.part == part for k in x.kernels]


def test_megatrons_clamps_are_kernels_of_their_own_and_the_host_waits_behind_them() -> None:
    layer = expert_layer("gpt-oss-20b", ep=8, framework="megatron", dispatcher="alltoall")
    forward = [k.name for k in kernels_of(layer, "F") if k.name.startswith(("expert_", "await_"))]
    clamp = next(k for k in kernels_of(layer, "F") if k.name == "expert_clamp")
    elements = 4096 * 4 * 2880  # rows of a rank times an expert's width
    assert forward[1:5] == ["expert_up", "expert_clamp", "await_offset", "expert_activation"]
    assert clamp.nbytes == pytest.approx(8 * elements)  # 16 bytes a 16-bit element: two clamps, one join of two halves
    assert clamp.backward_nbytes == pytest.approx(15 * elements)
    assert "expert_clamp" in [k.name for k in kernels_of(layer, "I")]


@pytest.mark.parametrize(("name", "framework"), [("gpt-oss-20b", "torchtitan"), ("mixtral-8x7b", "megatron")])
def test_compiled_code_and_models_without_limits_have_no_clamps(name: str, framework: str) -> None:
    layer = expert_layer(name, ep=4, framework=framework, dispatcher="alltoall")
    assert not {"expert_clamp", "await_offset"} & {k.name for part in "FI" for k in kernels_of(layer, part)}


def test_an_activation_computed_again_clamps_again_and_keeps_no_clamped_halves() -> None:
    made = shaped("gpt-oss-20b", seq_len=4096, layers=2, implementation="fused")
    parallel = ParallelConfig(framework="megatron", ep=8, etp=1, dispatcher="alltoall", routing=BALANCED)
    again = Recompute(granularity="selective", modules=("moe_act",))
    plain, repeated = (partition(made, parallel, r).stages[0].layers[1] for r in (Recompute(), again))
    elements = 4096 * 4 * 2880
    assert [k.name for k in kernels_of(repeated, "R")] == ["expert_clamp", "await_offset", "expert_activation"]
    assert plain.kept - repeated.kept == 2 * elements
    assert plain.kept_for_weights - repeated.kept_for_weights == elements
    assert repeated.repeated == 3 * elements


def test_hybrid_ep_gathers_the_routers_map_and_scans_it_before_tokens_go() -> None:
    layer = expert_layer("deepseek-v2-lite", ep=8, dispatcher="flex", flex_backend="hybridep")
    order = names(layer.forward)
    gathered = next(x for x in exchanges(layer, "dispatch map"))
    assert order.index("dispatch map") < order.index("read counts") < order.index("dispatch nvlink")
    assert (gathered.kind, gathered.dtype, gathered.elements) == ("all_gather", "uint8", 4096 * 64 * 8)
    scan = next(k for k in kernels_of(layer, "F") if k.name == "routing_scan")
    copies = distinct(8, 64, 6)
    moved = 4096 * (64 * 9 + 4 * 8 + 5 * copies * 8)  # maps read and written, places, rows of those that come
    assert 2 * scan.nbytes == pytest.approx(moved)
    assert not [x for x in layer.backward if x.name in {"dispatch map", "preprocess"}]
    assert not exchanges(expert_layer("deepseek-v2-lite", ep=8, dispatcher="flex"), "dispatch map")


def path_needs(layer: LocalLayer, name: str) -> set[str]:
    """Names of everything a work waits for, through works before it and needs."""
    items = layer.forward
    at = next(i for i, item in enumerate(items) if item.name == name)
    return {items[i].name for i in items[at].needs}


def test_shared_experts_run_beside_dispatch_only_if_told() -> None:
    beside = expert_layer("deepseek-v2-lite", ep=8, shared_expert_overlap=True)
    order = names(beside.forward)
    assert order.index("dispatch probs") < order.index("shared experts") < order.index("experts")
    assert path_needs(beside, "shared experts") == set()
    assert path_needs(beside, "experts") == {"dispatch probs"}
    after = names(expert_layer("deepseek-v2-lite", ep=8).forward)
    assert after[-1] == "unpermute+shared experts+moe"


def test_shared_experts_are_cut_over_tp_like_a_dense_mlp() -> None:
    layer = expert_layer("deepseek-v2-lite", ep=8, tp=4, sequence_parallel=True)
    found = Counter(x.kind for x in exchanges(layer, "shared experts") if x.dims == ("tp",))
    assert found == {"all_gather": 3, "reduce_scatter": 2}
    shared = [t for t in layer.tensors if "shared_experts" in t.name]
    assert sum(t.numel for t in shared) * 4 == 3 * 2048 * 2816
    router = next(t for t in layer.tensors if t.name.endswith("mlp.gate.weight"))
    assert router.numel == 2048 * 64
    assert layer.replicated >= router.numel


def test_experts_in_a_narrower_width_are_sent_narrower_rows() -> None:
    """Tokens are projected where they are, on every tensor-parallel rank whole, and back when they are home."""
    wide, narrow = (
        expert_layer("nemotron-3-nano-30b-a3b", 1024, ep=8, tp=2, sequence_parallel=True, **sizes)
        for sizes in ({}, {"experts": {"latent": 672}})
    )
    sent = [
        sum(x.elements for x in exchanges(layer, "", "all_to_all") if "probs" not in x.name) for layer in (wide, narrow)
    ]
    assert sent[0] / sent[1] == 2688 / 672
    order = [k.name for w in narrow.forward if isinstance(w, Work) for k in w.kernels]
    places = [
        order.index(name) for name in ("expert_latent_in", "dispatch", "expert_up", "combine", "expert_latent_out")
    ]
    assert places == sorted(places)
    shared = next(k.k for w in narrow.forward if isinstance(w, Work) for k in w.kernels if k.name == "shared_up")
    assert shared == 2688
    projections = [t for t in narrow.tensors if "latent_proj" in t.name]
    assert [t.numel for t in projections] == [2688 * 672] * 2


def test_latent_attention_gathers_its_latent_vectors_not_the_hidden_states() -> None:
    layer = expert_layer("deepseek-v3", ep=8, tp=8, sequence_parallel=True)
    gathered = [x.elements for x in layer.forward if isinstance(x, Exchange) and x.dims == ("tp",)]
    assert gathered[:3] == [4096 * 1536, 4096 * 512, 4096 * 64]
    down = next(t for t in layer.tensors if "q_a_proj" in t.name)
    up = next(t for t in layer.tensors if "q_b_proj" in t.name)
    assert (down.numel, up.numel) == (7168 * 1536, 1536 * 128 * 192 // 8)


# ---- two hops -------------------------------------------------------------------------------------------------------


def two_hops(
    per_node: int,
    backend: str = "deepep",
    per_domain: int = 0,
    float8: bool = False,
    fused: bool = False,
    **routing: object,
) -> LocalLayer:
    made = shaped("qwen3-30b-a3b", seq_len=1024, layers=1)
    parallel = ParallelConfig(
        ep=16,
        etp=1,
        dispatcher="flex",
        flex_backend=backend,
        float8_dispatch=float8,
        permute_fusion=fused,
        routing=Routing(**({"kind": "balanced"} | routing)),  # type: ignore[arg-type]
    )
    made_of = partition(made, parallel, nproc_per_node=per_node, nproc_per_domain=per_domain)
    return made_of.stages[0].layers[1]


@pytest.mark.parametrize("per_node", [1, 4, 8])
@pytest.mark.parametrize("routing", [{}, {"kind": "skewed", "skew": 3.0}])
def test_two_hops_carry_one_copy_per_node_then_one_per_rank(per_node: int, routing: dict[str, object]) -> None:
    layer = two_hops(per_node, **routing)
    far, near = (exchanges(layer, f"dispatch {hop}")[0] for hop in ("rdma", "nvlink"))
    nodes = 16 // per_node
    assert far.elements / (1024 * 2048) == pytest.approx(distinct(nodes, 128, 8) * (nodes - 1) / nodes)
    assert near.elements / (1024 * 2048) == pytest.approx(distinct(16, 128, 8))
    assert far.matrix
    assert near.matrix
    node, place = np.divmod(np.arange(16), per_node)
    assert not far.matrix.array[(node[:, None] == node) | (place[:, None] != place)].any()
    assert not near.matrix.array[node[:, None] != node].any()
    # Together they carry what one rank holds, sixteen times.
    assert [far.matrix.array.sum(), near.matrix.array.sum()] == pytest.approx([16, 16])
    assert far.communicator != near.communicator


def test_the_way_home_is_the_way_there_backwards() -> None:
    layer = two_hops(8, kind="skewed", skew=3.0)
    there = exchanges(layer, "dispatch rdma")[0]
    home = exchanges(layer, "combine rdma")[0]
    assert there.matrix
    assert home.matrix
    assert np.array_equal(there.matrix.array.T, home.matrix.array)


def test_a_dispatch_in_8_bits_carries_scales_and_what_comes_back_is_in_16() -> None:
    wide = two_hops(8)
    narrow = two_hops(8, float8=True)
    for name in ("dispatch", "combine gradient"):
        for hop in ("rdma", "nvlink"):
            before = exchanges(wide, f"{name} {hop}")[0]
            after = exchanges(narrow, f"{name} {hop}")[0]
            assert (before.dtype, after.dtype) == (None, "fp8")
            assert after.elements == pytest.approx(before.elements * (1 + 4 / 128))
            assert before.kernel is not None
            assert after.kernel is not None
            assert after.kernel.row == pytest.approx(before.kernel.row * (1 + 4 / 128))
    for name in ("combine rdma", "dispatch gradient rdma"):
        assert exchanges(wide, name)[0] == exchanges(narrow, name)[0]


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_the_host_waits_for_counts_ahead_of_a_dispatch(backend: str) -> None:
    forward = names(two_hops(8, backend, fused=True).forward)
    waits = [i for i, name in enumerate(forward) if "read counts" in name]
    assert len(waits) == 1
    assert waits[0] < forward.index("dispatch rdma")


def test_a_mask_that_picks_what_deepep_brought_is_summed_behind_the_dispatch() -> None:
    """Megatron-LM's _indices_to_multihot; hybridep permutes by itself."""
    layers = {backend: two_hops(8, backend).forward for backend in ("deepep", "hybridep")}
    waits = {
        backend: [i for i, name in enumerate(names(items)) if "read counts" in name]
        for backend, items in layers.items()
    }
    assert (len(waits["deepep"]), len(waits["hybridep"])) == (2, 1)
    behind = layers["deepep"][waits["deepep"][1]]
    dispatch = [names(layers["deepep"]).index(f"dispatch {hop}") for hop in ("rdma", "nvlink")]
    assert set(dispatch) <= set(behind.needs)


@pytest.mark.parametrize(("per_domain", "domains"), [(72, 1), (8, 2)])
def test_hybrideps_copies_carry_a_weight_for_each_expert_in_reach_there_and_its_gradient_home(
    per_domain: int, domains: int
) -> None:
    """csrc/hybrid_ep/extension/permute.cu reads a token's weights at ``token_id * num_of_local_experts *
    num_ranks_per_node``: 128 experts in one domain, 64 of them in each of two, in fp32 beside 2,048 elements in 16
    bits. Combine in forward, and its adjoint, send none (``with_probs``)."""
    hybrid = two_hops(8, "hybridep", per_domain)
    plain = two_hops(8, "deepep")
    for hop in ("rdma", "nvlink") if domains > 1 else ("nvlink",):
        moved = {
            name: exchanges(hybrid, f"{name} {hop}")[0].elements
            for name in ("dispatch", "combine", "combine gradient", "dispatch gradient")
        }
        wide = 1.0 + 2.0 * 128 / domains / 2048
        assert moved["combine"] == moved["combine gradient"]
        assert moved["dispatch"] == moved["dispatch gradient"] == pytest.approx(moved["combine"] * wide)
    for name in ("dispatch", "dispatch gradient"):
        assert exchanges(plain, f"{name} rdma")[0].elements == exchanges(plain, "combine rdma")[0].elements


@pytest.mark.parametrize("per_node", [1, 4, 8])
def test_tokens_that_take_experts_in_turn_go_to_few_ranks(per_node: int) -> None:
    """Of torchtitan's and NeMo Automodel's routers, whose (token, choice) is expert ``(token * k + choice) % E``: each
    token's copies counted, of 128 experts on 16 ranks."""
    layer = two_hops(per_node, kind="round_robin")
    far, near = (exchanges(layer, f"dispatch {hop}")[0] for hop in ("rdma", "nvlink"))
    visited = [{(token * 8 + choice) % 128 // 8 for choice in range(8)} for token in range(1024)]
    ranks = sum(map(len, visited)) / 1024
    away = [{rank // per_node for rank in ranks} - {home} for ranks in visited for home in range(16 // per_node)]
    assert near.elements / (1024 * 2048) == pytest.approx(ranks)
    assert far.elements / (1024 * 2048) == pytest.approx(sum(map(len, away)) / len(away))
    alike = Routing(kind="round_robin"), BALANCED
    sent = [exchanges(expert_layer("qwen3-30b-a3b", ep=8, routing=kind), "dispatch")[0].elements for kind in alike]
    assert sent[0] == sent[1]


def test_a_fused_permutation_reads_each_copy_once_and_writes_a_row_for_each_expert() -> None:
    moved = [
        {k.name: (k.nbytes, k.backward_nbytes) for x in layer.forward if isinstance(x, Work) for k in x.kernels}
        for layer in (two_hops(8), two_hops(8, fused=True))
    ]
    rows = 1024 * (8 + distinct(16, 128, 8)) * 2048
    for name in ("dispatch", "combine"):
        assert moved[1][name] == pytest.approx((rows, rows))
        assert sum(moved[1][name]) < sum(moved[0][name])


def test_of_two_hops_of_one_kernel_the_far_one_takes_the_sms() -> None:
    both = [exchanges(two_hops(8), f"dispatch {hop}")[0].kernel for hop in ("rdma", "nvlink")]
    alone = exchanges(two_hops(0), "dispatch nvlink")[0].kernel
    assert [kernel and kernel.within for kernel in (*both, alone)] == [False, True, False]


def test_one_node_needs_one_hop() -> None:
    layer = two_hops(0)
    assert not exchanges(layer, "dispatch rdma")
    assert exchanges(layer, "dispatch nvlink")[0].elements == pytest.approx(1024 * 2048 * distinct(16, 128, 8))


@pytest.mark.parametrize(("per_domain", "domains"), [(72, 1), (8, 2), (12, 4)])
def test_hybrideps_near_hop_reaches_the_nvlink_domain_and_deepeps_the_node(per_domain: int, domains: int) -> None:
    layer = two_hops(4, "hybridep", per_domain)
    far = exchanges(layer, "dispatch rdma")
    row = 2048 + 2 * 128 / domains  # weights in fp32 of the experts in reach
    copies = sum(x.elements for x in far) / (1024 * row)
    assert copies == pytest.approx(distinct(domains, 128, 8) * (domains - 1) / domains)
    tray = exchanges(two_hops(4, "deepep", per_domain), "dispatch rdma")[0]
    assert tray.elements / (1024 * 2048) == pytest.approx(distinct(4, 128, 8) * 3 / 4)


@pytest.mark.parametrize(("name", "per_domain"), [("gb200-nvl72", 72), ("hgx-h100", 0)])
def test_a_mesh_knows_the_nvlink_domain_of_its_ranks(name: str, per_domain: int) -> None:
    assert fabrics.mesh(fabrics.load(name, nodes=36)).nproc_per_domain == per_domain


# ---- routing --------------------------------------------------------------------------------------------------------

ROUTERS = st.builds(
    lambda kind, skew, seed, ep, k: ExpertRouter(
        Routing(kind=kind, seed=seed, skew=1 + skew * (16 / k - 1) if kind == "skewed" else 1.0), 16, k, ep, 256.0
    ),
    st.sampled_from(["uniform", "balanced", "skewed"]),
    st.floats(0, 1),
    st.integers(0, 9),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
)


@given(ROUTERS)
@settings(max_examples=60, deadline=None)
def test_rows_sent_are_rows_received(router: ExpertRouter) -> None:
    found = routed(router)
    assert found.rows == pytest.approx(256 * router.per_token)
    if found.matrix is not None:
        assert len(found.load) == router.ep
        assert found.matrix.array.sum(axis=1) == pytest.approx(np.ones(router.ep))
        assert found.matrix.array.sum(axis=0) == pytest.approx(np.array(found.load))
        assert np.mean(found.load) == pytest.approx(1.0)


@given(st.integers(2, 64), st.integers(1, 8), st.floats(0, 1))
def test_the_busiest_expert_has_the_skew_and_no_token_visits_one_twice(experts: int, k: int, part: float) -> None:
    k = min(k, experts)
    skew = 1 + part * (experts / k - 1)
    loads = popularity(experts, k, skew)
    assert loads.sum() == pytest.approx(experts)
    assert loads[0] == pytest.approx(skew, rel=1e-3)
    assert loads.max() <= experts / k * (1 + 1e-9)
    assert (np.diff(loads) <= 1e-9).all()


def test_the_same_seed_draws_the_same_loads_and_another_seed_others() -> None:
    first, again, other = (routed(ExpertRouter(Routing(seed=s), 8, 2, 8, 512.0)).load for s in (1, 1, 2))
    assert first == again != other


def test_a_skew_beyond_every_token_is_refused() -> None:
    with pytest.raises(ScenarioError, match="skew = 5 must be from 1 to 4, where every token visits the busiest of 8"):
        popularity(8, 2, 5.0)


def test_drops_cut_the_peak_and_padding_makes_all_alike() -> None:
    skewed = Routing(kind="skewed", skew=3.0)
    free = routed(ExpertRouter(skewed, 8, 2, 8, 512.0))
    most = capacity(512, 8, 2, 1.25)
    dropped = routed(ExpertRouter(skewed, 8, 2, 8, 512.0, most))
    padded = routed(ExpertRouter(skewed, 8, 2, 8, 512.0, most, True))
    grown = routed(ExpertRouter(skewed, 8, 2, 8, 512.0, most, True, False))
    assert free.imbalance * free.rows == pytest.approx(3 * 1024)
    assert dropped.imbalance * dropped.rows == pytest.approx(most * 8)
    assert dropped.rows < free.rows
    assert (padded.rows, padded.load, padded.matrix) == (most * 8, (), None)
    assert grown.rows == 8 * 3 * 128


def test_a_measured_histogram_sets_the_loads(tmp_path: Path) -> None:
    path = tmp_path / "loads.csv"
    path.write_text("3,1,1,1,1,1,1,1\n1,1,1,1,1,1,1,3\n", encoding="utf-8")
    counts = read_histogram(path)
    parallel = ParallelConfig(ep=4, etp=1, dispatcher="alltoall", routing=Routing(kind="histogram", file="loads.csv"))
    layers = partition(shaped("mixtral-8x7b", layers=2), parallel, histograms=counts).stages[0].layers
    assert layers[1].expert_load == pytest.approx((1.6, 0.8, 0.8, 0.8))
    assert layers[2].expert_load == pytest.approx((0.8, 0.8, 0.8, 1.6))
    path.write_text("1,2\n1,x\n", encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"loads.csv, line 2: .*'x'"):
        read_histogram(path)


BAD = [
    ({"tp": 2, "ep": 2}, "tp = 2 needs sequence_parallel = true, which is false"),
    ({"tp": 2, "etp": 2, "ep": 2, "sequence_parallel": True, "dispatcher": "flex"}, "'flex' is described for etp = 1"),
    ({"ep": 2, "routing": Routing(kind="histogram", file="x.csv")}, "the histogram has 0 experts and the model 8"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_what_is_not_described_says_so(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        expert_layer("mixtral-8x7b", **change)


def test_memory_is_the_busiest_positions_rows() -> None:
    """What experts keep is by received rows; what the router's side keeps is not."""
    flat = two_hops(8)
    skewed = two_hops(8, kind="skewed", skew=3.0)
    busiest = max(skewed.expert_load) / max(flat.expert_load, default=1.0)
    assert busiest > 1.2
    kernels = [kernel for item in flat.forward if isinstance(item, Work) for kernel in item.kernels]
    received = {True: 0.0, False: 0.0}  # by whether a product keeps it for its weights
    for kernel in kernels:
        if kernel.name.startswith("expert_"):
            received[kernel.kind == "gemm"] += kernel.saved
    assert skewed.kept - flat.kept == pytest.approx((busiest - 1) * received[False])
    assert skewed.kept_for_weights - flat.kept_for_weights == pytest.approx((busiest - 1) * received[True])


def test_a_rank_has_the_first_experts_and_names_are_read_once_for_all_partitions(monkeypatch):
    mixtral = replace(model("mixtral-8x7b"))  # of which nothing was read yet
    layers = [i for i, layer in enumerate(mixtral.layers) if layer.kind == "block"]
    read = []
    number = expert._number
    monkeypatch.setattr(expert, "_number", lambda tensor: read.append(tensor) or number(tensor))
    for ep, etp in itertools.product((1, 2, 8), (1, 2)):
        for i in layers:
            local = expert.expert_tensors(mixtral, i, ep, etp)
            own = [t for t in mixtral.layers[i].tensors if ".experts." in t.name]
            kept = [t for t in own if int(t.name.partition(".experts.")[2].partition(".")[0]) < 8 // ep]
            assert [t.name for t in local] == [t.name for t in kept]
            assert [t.numel for t in local] == [t.numel // (1 if t.cut == "expert" else etp) for t in kept]
            assert {*own}.isdisjoint(expert.other_tensors(mixtral, i))
            assert len(own) + len(expert.other_tensors(mixtral, i)) == len(mixtral.layers[i].tensors)
    assert len(read) == len(layers) * 8 * 3


@pytest.mark.parametrize("topology", ["hgx-a100", "hgx-mi300x"])
def test_hybridep_is_refused_where_there_are_no_bulk_copies(topology: str) -> None:
    table = mixture_on(topology, "hybridep")
    with pytest.raises(ScenarioError, match=r"flex_backend = 'hybridep' needs the bulk copies \(TMA\)"):
        load(table).prepare()


def test_deepep_on_amd_says_whose_kernels_are_played() -> None:
    amd, nvidia = (load(mixture_on(name, "deepep")).prepare().program.notes for name in ("hgx-mi300x", "hgx-h100"))
    assert any("timed on NVIDIA's GPUs alone" in note for note in amd)
    assert not any("timed on NVIDIA's" in note for note in nvidia)


def mixture_on(topology: str, backend: str) -> Table:
    """A small mixture of experts, spread over a node by DeepEP's kernels or HybridEP's."""
    return {
        "cluster": {"topology": topology, "nodes": 1},
        "model": {"name": "deepseek-v2-lite", "seq_len": 1024, "dtype": "bf16"},
        "parallel": {"ep": 8, "dispatcher": "flex", "flex_backend": backend},
        "strategy": {"kind": "ddp", "micro_batch_size": 1},
        "run": {"steps": 1},
    }
