"""Hyper-connections (Hy4): against torch's own counters and what a trace of transformers' class says."""

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
