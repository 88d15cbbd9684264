"""torchtitan's own all-to-all: what a rank issues for a mixture of experts, and how much of it."""

from __future__ import annotations

import pytest

from clustersim.core.model import Kernel
from clustersim.training.partition.base import Exchange, LocalLayer, Work
from tests.test_expert_parallel import exchanges, expert_layer, names

TOKENS = 4096
HIDDEN = 2048
CHOSEN = 8
SPLITS = [{"ep": 8}, {"tp": 4, "ep": 8, "etp": 1}, {"tp": 4, "ep": 2, "etp": 4}]


def titan(name: str = "qwen3-30b-a3b", **parallel: object) -> LocalLayer:
    return expert_layer(name, framework="torchtitan", sequence_parallel="tp" in parallel, **parallel)


def kernel(layer: LocalLayer, name: str) -> Kernel:
    return next(k for w in layer.forward if isinstance(w, Work) for k in w.kernels if k.name == name)


def test_counts_go_by_an_all_to_all_and_weights_stay() -> None:
    layer = titan(ep=8)
    start = names(layer.forward).index("tokens per expert")
    order = ["tokens per expert", "permute", "read counts", "dispatch", "experts", "combine", "unpermute+moe"]
    assert names(layer.forward[start:]) == order
    assert [x.kind for x in exchanges(layer, "tokens per expert")] == ["all_to_all"]
    assert not [x for x in exchanges(layer, "") if "probs" in x.name]


@pytest.mark.parametrize(("split", "rows"), list(zip(SPLITS, (1.0, 0.25, 1.0), strict=True)))
def test_a_rank_sends_what_its_position_routes(split: dict[str, int], rows: float) -> None:
    """Ranks that cut experts all send every row of their position; where tp is lent to ep each has a part."""
    every = [x for x in exchanges(titan(**split), "", "all_to_all") if x.dtype is None]
    assert len(every) == 4
    assert {x.elements for x in every} == {rows * TOKENS * CHOSEN * HIDDEN}


@pytest.mark.parametrize("split", SPLITS[1:])
def test_a_mixture_gathers_its_tokens_and_scatters_partial_sums(split: dict[str, int]) -> None:
    layer = titan(**split)
    around = [(x.kind, x.elements) for x in exchanges(layer, "moe")]
    kinds = ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]
    assert around == [(kind, TOKENS * HIDDEN) for kind in kinds]
    assert kernel(layer, "router").m == TOKENS
    assert kernel(expert_layer("qwen3-30b-a3b", sequence_parallel=True, **split), "router").m == TOKENS // 4


def test_shared_experts_read_what_the_mixture_gathered() -> None:
    layer = titan("deepseek-v2-lite", tp=2, ep=2, etp=2)
    assert not exchanges(layer, "shared experts")
    assert kernel(layer, "shared_up").m == TOKENS
    assert exchanges(expert_layer("deepseek-v2-lite", tp=2, ep=2, etp=2, sequence_parallel=True), "shared experts")


def test_experts_that_are_cut_compute_a_positions_rows_once() -> None:
    """Over etp nothing is gathered: what comes to one of those ranks comes to all."""
    layer = titan(tp=4, ep=2, etp=4)
    whole = titan(ep=2)
    assert not [x for x in [*layer.forward, *layer.backward] if isinstance(x, Exchange) and x.dims == ("etp",)]
    assert kernel(layer, "expert_up").flops == kernel(whole, "expert_up").flops / 4
    assert kernel(layer, "sort_rows").nbytes == kernel(whole, "sort_rows").nbytes == 2 * TOKENS * CHOSEN * HIDDEN


def test_rows_are_summed_over_all_tokens_that_a_rank_has_seen() -> None:
    """Forward 2 passes over what came back and 6 over every row; backward 2 and 7."""
    rows = TOKENS * CHOSEN * HIDDEN
    for split, own in zip(SPLITS, (1.0, 0.25, 1.0), strict=True):
        summed = kernel(titan(**split), "combine")
        assert (summed.nbytes, summed.backward_nbytes) == ((2 * own + 6) * rows, (2 * own + 7) * rows)


def test_a_fused_permutation_is_anothers() -> None:
    """Transformer Engine's and NeMo Automodel's, whose weights travel as Megatron-LM's do."""
    assert exchanges(titan(ep=8, permute_fusion=True), "dispatch probs")
