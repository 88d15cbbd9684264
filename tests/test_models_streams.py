"""Hyper-connections (Hy4, DeepSeek-V4, GLM-5.3, Qwen4): against torch's counters and traces of the classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from clustersim.core.errors import ModelError
from clustersim.core.model import Kernel, Model
from clustersim.model import from_hf
from clustersim.model.streams import is_of_streams

TOKENS, WIDTH, STREAMS = 128, 256, 4
CONFIG: dict[str, Any] = {
    "model_type": "hy_v4",
    "vocab_size": 512,
    "hidden_size": WIDTH,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_topk": 1024,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "mlp_layer_types": ["dense", "dense"],
    "hc_mult": STREAMS,
    "hc_magnitude": 2.0,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


MIXED: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "head_dim": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 64,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
    "num_hidden_layers": 3,
    "index_topk": 8,
    "hc_sinkhorn_iters": 20,
    **{
        name: CONFIG[name]
        for name in CONFIG
        if name.startswith(
            ("vocab", "hidden", "moe", "n_", "num_e", "num_a", "q_lora", "index_head", "index_n", "hc_mu")
        )
    },
    **{name: CONFIG[name] for name in ("swiglu_limit", "tie_word_embeddings", "max_position_embeddings")},
    **{name: CONFIG[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
}
"""A DeepSeek-V4 with a block of each kind: its streams are mixed."""


def made(**how: Any) -> Model:
    return from_hf(CONFIG, seq_len=TOKENS, **how)


def test_blocks_and_head_are_handed_every_stream() -> None:
    model = made()
    assert [layer.boundary_bytes for layer in model.layers[1:]] == [TOKENS * WIDTH * STREAMS] * 3
    assert from_hf(CONFIG | {"hc_mult": 1}, seq_len=TOKENS).layers[1].boundary_bytes == TOKENS * WIDTH


def test_streams_take_the_place_of_residual_sums() -> None:
    names = [kernel.name for kernel in made().layers[1].kernels if kernel.launches]
    assert names[:3] == ["streams_weights", "streams_in", "norm_1"]
    assert names[names.index("out") + 1 :][:4] == ["streams_out_attention", "streams_weights", "streams_in", "norm_2"]
    assert names[-1] == "streams_out_mlp"
    assert not any("residual" in name for name in names)


def test_fused_streams_move_less() -> None:
    def moved(model: Model) -> float:
        """Bytes forward of what streams cost in a block, in 16 bits."""
        return sum(k.nbytes for k in model.layers[1].kernels if is_of_streams(k))

    elements = TOKENS * WIDTH * STREAMS
    assert moved(made(implementation="fused")) == pytest.approx(2 * elements * (4 + 2 / STREAMS))
    assert moved(made()) > 5 * moved(made(implementation="fused"))


def test_flops_are_those_that_torch_counts() -> None:
    torch = pytest.importorskip("torch", reason="the class is torch's")
    transformers = pytest.importorskip("transformers", reason="the class is transformers'")
    from torch.utils.flop_counter import FlopCounterMode

    config = transformers.HYV4Config(**{name: value for name, value in CONFIG.items() if name != "model_type"})
    whole = transformers.HYV4ForCausalLM._from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        whole(input_ids=torch.ones(1, TOKENS, dtype=torch.long), use_cache=False)
    kernels = [k for layer in made(attention="eager").layers for k in layer.kernels]
    ours = sum(k.flops for k in kernels if not k.name.endswith("latent_norm"))
    # Its indexer scores masked keys, too, and sums heads by a product.
    scores = sum(k.flops for k in kernels if k.name == "index_scores")
    blocks = sum(k.name == "index_scores" for k in kernels)
    assert ours + scores + blocks * 2 * CONFIG["index_n_heads"] * TOKENS**2 == counter.get_total_flops()


@pytest.mark.parametrize("length", [TOKENS, 18])
def test_flops_of_compressed_keys_and_mixed_streams_are_those_that_torch_counts(length: int) -> None:
    torch = pytest.importorskip("torch", reason="the class is torch's")
    transformers = pytest.importorskip("transformers", reason="the class is transformers'")
    from torch.utils.flop_counter import FlopCounterMode

    config = transformers.DeepseekV4Config(**{name: value for name, value in MIXED.items() if name != "model_type"})
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    whole = transformers.DeepseekV4ForCausalLM._from_config(config, **how)
    with FlopCounterMode(display=False) as counter:
        whole(input_ids=torch.ones(1, length, dtype=torch.long), use_cache=False)
    kernels = [k for layer in from_hf(MIXED, seq_len=length, attention="eager").layers for k in layer.kernels]
    ours = sum(k.flops for k in kernels if not k.name.endswith("latent_norm"))
    # Its indexer scores masked keys, too.
    masked = sum(2 * k.batch * k.m * k.n * k.k - k.flops for k in kernels if k.name == "index_scores")
    assert ours + masked == counter.get_total_flops()


@pytest.mark.parametrize("pool", [1, 4])
def test_flops_of_chosen_pools_of_keys_are_those_that_torch_counts(pool: int) -> None:
    torch = pytest.importorskip("torch", reason="the class is torch's")
    pytest.importorskip("transformers", reason="the class is transformers'")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.glm5_next import configuration_glm5_next, modeling_glm5_next

    fields = {name: value for name, value in CONFIG.items() if name not in {"model_type", "hc_magnitude"}}
    fields |= {"qk_rope_head_dim": 0, "index_kpool": pool, "index_topk": 8, "mlp_layer_types": ["dense", "sparse"]}
    fields |= {"layer_types": ["indexed_attention"] * 2, "num_key_value_heads": 4, "hc_sinkhorn_iters": 3}
    config = configuration_glm5_next.Glm5NextTextConfig(**fields)
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    decoder = modeling_glm5_next.Glm5NextTextModel._from_config(config, **how)
    with FlopCounterMode(display=False) as counter:
        decoder(input_ids=torch.ones(1, TOKENS, dtype=torch.long), use_cache=False)
    made = from_hf(fields | {"model_type": "glm5_next_text"}, seq_len=TOKENS, attention="eager")
    kernels = [k for layer in made.layers for k in layer.kernels if k.name != "logits"]
    ours = sum(k.flops for k in kernels if not k.name.endswith("latent_norm"))
    # Its indexer scores masked pools, too, and sums heads by a product.
    scores = [k for k in kernels if k.name == "index_scores"]
    masked = sum(2 * k.batch * k.m * k.n * (k.k + 1) - k.flops for k in scores)
    assert ours + masked == counter.get_total_flops()


LOW_RANK: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "hc_count": 3,
    "hc_lowrank": 12,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 90,
    "heads_per_ngram": 2,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
}
"""A small Qwen4-Exp: each element of its streams has a weight of its own."""


def _counted(config: dict[str, Any], tokens: int) -> tuple[float, int]:
    """FLOPs of a Qwen4-Exp, ours but for its indexer's scores, and as torch counts them."""
    pytest.importorskip("transformers", reason="the class is transformers'")
    from test_models_families import counted_flops

    made = from_hf(config, seq_len=tokens, attention="eager")
    ours = sum(k.flops for layer in made.layers for k in layer.kernels if k.name != "index_scores")
    return ours, counted_flops(config, tokens)


def test_flops_of_weights_of_low_rank_and_chosen_keys_are_those_that_torch_counts() -> None:
    config = LOW_RANK | {"layer_types": ["indexed_attention"] * 2}
    ours, theirs = _counted(config, 48)
    pools = sum((token + 1) // 4 for token in range(48))
    assert ours + 2 * 2 * 2 * 16 * pools == theirs


def test_flops_of_features_of_ngrams_are_those_that_torch_counts() -> None:
    config = LOW_RANK | {"layer_types": ["linear_attention"] * 2}
    without, with_them = (_counted(config | {"ple_layer_ids": ids}, 48) for ids in ([], [2]))
    assert with_them[0] - without[0] == with_them[1] - without[1] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indexer_compress_ratio": 3}, "'indexer_compress_ratio' = 3 must divide 'indexer_budget' = 8"),
        ({"indexer_budget": None}, "missing 'indexer_budget'"),
        ({"indexer_kv_heads": 2}, "'indexer_kv_heads' = 2 is not described; only 1 is"),
        ({"ple_layer_ids": [3]}, r"'ple_layer_ids' = \[3\] must be numbers of blocks, from 1 to 2"),
        ({"ple_layer_ids": [1], "ple_embed_dim": 30}, "'ple_embed_dim' = 30 is not shared evenly by 4 heads"),
        ({"layer_types": ["sliding_attention"] * 2}, "'layer_types' must be 'linear_attention' or 'indexed_attention'"),
    ],
)
def test_what_a_qwen4_may_not_be_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_hf(LOW_RANK | change)


def test_a_query_sees_its_window_and_the_compressed_keys_before_it() -> None:
    blocks = [layer for layer in from_hf(MIXED, seq_len=TOKENS).layers if layer.kind == "block"]
    heads = 4.0 * MIXED["num_attention_heads"] * MIXED["head_dim"]
    window = 64 * TOKENS - 64**2 / 2
    every = sum((token + 1) // 16 for token in range(TOKENS))
    chosen = sum(min(8, (token + 1) // 4) for token in range(TOKENS))
    pairs = [k.flops / heads for layer in blocks for k in layer.kernels if k.name == "attention"]
    assert pairs == [window, window + every, window + chosen]


def test_each_iteration_of_sinkhorn_divides_rows_and_columns() -> None:
    def launched(iterations: int) -> int:
        """Kernels forward of a block."""
        model = from_hf(MIXED | {"hc_sinkhorn_iters": iterations}, seq_len=TOKENS)
        return sum(k.launches for k in model.layers[1].kernels)

    assert launched(20) - launched(19) == 2 * 2 * 3  # halves, rows and columns, and what a division launches


@pytest.mark.slow
@pytest.mark.parametrize("types", [0, 1, 2])
def test_bytes_are_those_of_a_trace(types: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the class is transformers'")
    from clustersim.model.traced import read_traced
    from clustersim.model.tracing import trace_model
    from clustersim.model.tracing.inputs import read_input
    from clustersim.model.tracing.loading import Target, target_of
    from clustersim.training.memory import layer_bytes

    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode(CONFIG))
    name = ("bf16", "autocast", "fp32")[types]
    target = Target(*target_of("transformers:HYV4ForCausalLM"), file, {})
    traced = trace_model(target, (read_input(f"tokens[1, {TOKENS}]"),), (name,), loss="cross_entropy")
    written = tmp_path / "x.model.json"
    written.write_bytes(msgspec.json.encode(traced))
    theirs = read_traced(written, types)
    ours = made(attention="eager")
    whole = TOKENS * WIDTH * STREAMS

    def moved(kernel: Kernel, back: bool) -> float:
        """Bytes that a kernel moves."""
        sizes = (kernel.backward_element if back else kernel.element) or (2.0, 2.0, 4.0)
        return (kernel.backward_nbytes if back else kernel.nbytes) * sizes[types]

    for place, off in ((1, 0.06), (3, 0.05)):  # what masks and chosen keys take besides is not counted
        block, traced_block = ours.layers[place], theirs.layers[place]
        keeps = [sum(k.kept_bytes(types) for k in layer.kernels) for layer in (block, traced_block)]
        assert keeps[0] == pytest.approx(keeps[1], rel=off)
        run: Any = type("Run", (), {"micro_batch_size": 1, "compiled": False})
        peaks = [layer_bytes(layer, run, types, 4).total for layer in (block, traced_block)]
        assert peaks[0] == pytest.approx(peaks[1], rel=off)
    # Of the head nothing but streams, a norm, logits and their loss.
    kernels = msgspec.to_builtins(traced)["works"][-1][name]["kernels"]
    for back, label in ((False, "nbytes"), (True, "backward_nbytes")):
        total = sum(kernel.get(label, 0.0) for kernel in kernels)
        assert sum(moved(k, back) for k in ours.layers[3].kernels) == pytest.approx(total, rel=0.1)
        assert sum(moved(k, back) for k in ours.layers[3].kernels if is_of_streams(k)) > 20 * whole


def test_what_streams_may_not_be_is_named() -> None:
    with pytest.raises(ModelError, match="'hc_mult' = 0 must be a whole number above zero, the streams"):
        from_hf(CONFIG | {"hc_mult": 0})
    llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    llama |= {"intermediate_size": 96, "vocab_size": 96, "hc_mult": 4}
    with pytest.raises(ModelError, match="'hc_mult' = 4 changes a model's tensors"):
        from_hf(llama)
    with pytest.raises(ModelError, match="'swiglu_limit' = None must be a number"):
        from_hf(CONFIG | {"swiglu_limit": None})
    with pytest.raises(ModelError, match="only 'indexed_attention' is described"):
        from_hf(CONFIG | {"layer_types": ["full_attention", "indexed_attention"]})


@pytest.mark.slow
def test_bytes_of_mixed_streams_are_those_of_a_trace(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the class is transformers'")
    from clustersim.model.traced import read_traced
    from clustersim.model.tracing import trace_model
    from clustersim.model.tracing.inputs import read_input
    from clustersim.model.tracing.loading import Target, target_of
    from clustersim.training.memory import layer_bytes

    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode(MIXED))
    target = Target(*target_of("transformers:DeepseekV4ForCausalLM"), file, {})
    traced = trace_model(target, (read_input(f"tokens[1, {TOKENS}]"),), ("bf16",), loss="cross_entropy")
    written = tmp_path / "x.model.json"
    written.write_bytes(msgspec.json.encode(traced))
    run: Any = type("Run", (), {"micro_batch_size": 1, "compiled": False})
    ours = from_hf(MIXED, seq_len=TOKENS, attention="eager")
    for layer, theirs in zip(ours.layers[1:], read_traced(written, 0).layers[1:], strict=True):
        keeps = [sum(k.kept_bytes(0) for k in each.kernels) for each in (layer, theirs)]
        moves = [sum(k.nbytes + k.backward_nbytes for k in each.kernels) for each in (layer, theirs)]
        peaks = [layer_bytes(each, run, 0, 4).total for each in (layer, theirs)]
        assert keeps[0] == pytest.approx(keeps[1], rel=0.04), layer.name
        assert moves[0] == pytest.approx(moves[1], rel=0.05), layer.name
        assert peaks[0] == pytest.approx(peaks[1], rel=0.11), layer.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "'layer_types' must be 'sliding_attention' or 'compressed_sparse"),
        ({"layer_types": None, "compress_ratios": [0, 8, 4]}, "'compress_ratios' = .* must be 0, 4 or 128 for each of"),
        ({"compress_rates": {"compressed_sparse_attention": 0}}, "compress_rates: 'compressed_sparse_attention' = 0"),
        ({"partial_rotary_factor": 2}, "'partial_rotary_factor' = 2 must be a number above zero, at most 1"),
        ({"o_groups": 3}, "'o_groups' = 3 does not divide 4 heads evenly"),
        ({"n_shared_experts": 2}, "'n_shared_experts' = 2 is not described; only 1 is"),
        ({"num_key_value_heads": 4}, "'num_key_value_heads' = 4 is not described; only 1 is"),
        ({"mlp_layer_types": ["dense"] * 3}, "'mlp_layer_types' = .* must be 'hash_moe' or 'moe' for each block"),
    ],
)
def test_what_a_deepseek_v4_may_not_be_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_hf(MIXED | change)
