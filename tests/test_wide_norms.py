"""Norms that multiply by their weights in fp32, and queries that are rotated in it: what a 16-bit step moves and keeps,
counted by operator, and which families have them."""

from __future__ import annotations

from typing import Any

import pytest

from clustersim.core.errors import ModelError
from clustersim.core.model import AUTOCAST, HALF, Kernel
from clustersim.core.texts import check
from clustersim.model import from_hf

SIZES = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 4000}
SIZES |= {"intermediate_size": 1376, "num_key_value_heads": 8, "max_position_embeddings": 1024}
TOKENS = 256
ELEMENTS = TOKENS * 512


def kernel(kind: str, name: str, **more: Any) -> Kernel:
    shape = from_hf({"model_type": kind, **SIZES, **more}, seq_len=TOKENS, attention="flash", implementation="eager")
    return next(k for k in shape.layers[1].kernels if k.name == name)


def moved(one: Kernel) -> tuple[float, float]:
    """Bytes of an element, forward and backward, in 16 bits."""
    return 2.0 * one.nbytes / ELEMENTS, 2.0 * one.backward_nbytes / ELEMENTS


@pytest.mark.parametrize(
    ("kind", "name", "more", "ahead", "back", "kept"),
    [
        # A cast to fp32, a square, its mean, the scaling, a cast back, the weight's product: 6 + 8 + 4 + 8 + 6 + 4.
        ("llama", "norm_1", {}, 36.0, 92.0, 6.0),
        ("olmoe", "norm_1", {"num_experts": 4, "num_experts_per_tok": 2}, 36.0, 92.0, 6.0),
        # The weight's product before the cast: 6 + 8 + 4 + 8 + 8 + 6; what it multiplies is kept in fp32.
        ("olmo2", "norm_1", {}, 40.0, 104.0, 8.0),
        ("olmo3", "norm_1", {}, 40.0, 104.0, 8.0),
        ("gemma2", "norm_1", {"head_dim": 64}, 40.0, 104.0, 8.0),
        ("helium", "norm_1", {"head_dim": 64}, 40.0, 104.0, 8.0),
    ],
)
def test_a_norms_weight_is_multiplied_in_16_bits_or_in_fp32(
    kind: str, name: str, more: dict[str, Any], ahead: float, back: float, kept: float
) -> None:
    one = kernel(kind, name, **more)
    assert moved(one) == pytest.approx((ahead, back))
    assert one.kept is not None
    assert one.kept[HALF] / ELEMENTS == pytest.approx(kept)
    assert one.kept[AUTOCAST] / ELEMENTS == pytest.approx(8.0)


def test_olmo_rotates_in_fp32() -> None:
    # Two products with fp32 cosines, half of it negated, joined, a sum and a cast: 6 + 2 + 4 + 6 + 12 + 6.
    wide = kernel("olmo2", "rotary")
    plain = kernel("llama", "rotary")
    both = 2  # queries and keys
    assert [x / both for x in moved(wide)] == pytest.approx([36.0, 60.0])
    assert [x / both for x in moved(plain)] == pytest.approx([20.0, 34.0])


def test_a_compiled_norm_is_one_kernel_of_16_bits_in_either() -> None:
    made = [
        from_hf({"model_type": kind, **SIZES}, seq_len=TOKENS, implementation="fused").layers[1].kernels
        for kind in ("llama", "olmo2")
    ]
    norms = [next(k for k in kernels if k.name == "norm_1") for kernels in made]
    assert norms[0].nbytes == norms[1].nbytes


def test_the_limit_of_a_state_spaces_step_may_be_infinite_and_nothing_else() -> None:
    for most in (float("inf"), 1e308):
        check({"time_step_limit": [0.0, most]}, "config.json", ModelError)
    for wrong in ({"hidden_size": float("inf")}, {"time_step_limit": [0.0, float("nan")]}):
        with pytest.raises(ModelError, match="is not a number that a field can hold"):
            check(wrong, "config.json", ModelError)
