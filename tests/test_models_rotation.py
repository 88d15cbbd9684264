"""Which blocks rotate their queries and keys, and which see a window: against transformers' own classes."""

from __future__ import annotations

import random
import sys
import zlib
from collections import Counter
from typing import Any

import pytest
from test_models_families import random_config

from clustersim.core.errors import ModelError
from clustersim.model import from_hf

torch = pytest.importorskip("torch", reason="the classes are torch's")
transformers = pytest.importorskip("transformers", reason="the classes are transformers'")
TorchDispatchMode: Any = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode

TOKENS = 48
KINDS = ["cohere2_moe", "cohere2", "cwm", "exaone4", "granitemoehybrid", "llama4_text", "minimax", "smollm3"]
"""Types of which not every block rotates, or of which a window is not what their kin have."""


def seen_by_blocks(config: dict[str, Any]) -> tuple[Counter[int], dict[int, int]]:
    """Of each block of the class, how often it rotates, and how many pairs of tokens its mask lets through."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    rotations: Counter[int] = Counter()
    pairs: dict[int, int] = {}
    running = [0]

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
        """What attention is handed; its output is zero."""
        pairs[running[0]] = int((mask[0, 0].float() > -1).sum())
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return query.new_zeros(shape), None

    ALL_ATTENTION_FUNCTIONS.register("seen", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("seen", eager_mask)
    made = CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"})
    whole = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="seen")
    for i, layer in enumerate(whole.model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: running.__setitem__(0, i))
    module = sys.modules[type(whole).__module__]
    name = "apply_rotary_emb" if hasattr(module, "apply_rotary_emb") else "apply_rotary_pos_emb"
    rotate = getattr(module, name)

    def counted(*given: Any, **named: Any) -> Any:
        """The rotation, counted."""
        rotations[running[0]] += 1
        return rotate(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, counted)
        whole(input_ids=torch.ones(1, TOKENS, dtype=torch.long), use_cache=False)
    return rotations, pairs


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_rotate_and_see_what_they_do_in_the_class(kind: str) -> None:
    rng = random.Random(zlib.crc32(kind.encode()))
    for _ in range(3):
        config = random_config(kind, rng)
        rotations, pairs = seen_by_blocks(config)
        blocks = [layer for layer in from_hf(config, seq_len=TOKENS).layers if layer.kind == "block"]
        for i, block in enumerate(blocks):
            kernels = {kernel.name: kernel for kernel in block.kernels}
            assert ("rotary" in kernels) == (rotations[i] > 0), (i, config)
            assert ("attention" in kernels) == (i in pairs), (i, config)
            if i in pairs:
                heads = 4.0 * config["num_attention_heads"] * from_hf(config).head_dim
                # The diagonal counts half.
                assert kernels["attention"].flops / heads == pytest.approx(pairs[i], abs=TOKENS / 2), (i, config)


def test_a_dense_block_of_command_a_rotates_unless_it_has_a_period_of_windows() -> None:
    config = random_config("cohere2_moe", random.Random(1)) | {"num_hidden_layers": 3, "sliding_window": 16}
    config |= {"layer_types": ["full_attention"] * 3, "mlp_layer_types": ["dense", "sparse", "dense"]}
    for period, rotates in ((1, [True, False, True]), (2, [False] * 3)):
        made = from_hf(config | {"prefix_dense_sliding_window_pattern": period}, seq_len=TOKENS)
        blocks = [layer for layer in made.layers if layer.kind == "block"]
        assert [any(k.name == "rotary" for k in block.kernels) for block in blocks] == rotates


def test_a_list_of_blocks_that_rotate_is_one_truth_a_block() -> None:
    config = random_config("smollm3", random.Random(1)) | {"num_hidden_layers": 3}
    for wrong in ([1], [1, 2, 0]):
        with pytest.raises(ModelError, match="'no_rope_layers' must be 1 for each block with rotation and 0 for each"):
            from_hf(config | {"no_rope_layers": wrong})


def test_attention_across_to_an_encoder_is_refused() -> None:
    for kind in ("gpt2", "xglm"):
        with pytest.raises(ModelError, match="'add_cross_attention' = True changes a model's tensors"):
            from_hf(random_config(kind, random.Random(1)) | {"add_cross_attention": True})


class Moved(TorchDispatchMode):
    """Elements that operators read and write; a slice's gradient is laid into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [item for arg in args for item in (arg if isinstance(arg, list) else [arg])]
        name = func.__name__.partition(".")[0]
        sizes = [item.numel() for item in given if isinstance(item, torch.Tensor)]
        if name == "slice_backward":
            self.elements += 2 * sizes[0] + result.numel()
        elif name in {"mul", "neg", "cat", "add", "clone"}:
            self.elements += result.numel() + sum(size for size in sizes if 4 * size >= result.numel())  # not cosines
        return result


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_rotation_of_a_share_of_each_head_moves_what_torch_moves(share: float) -> None:
    heads, dim = 8, 64
    config = {"model_type": "gpt_neox", "hidden_size": heads * dim, "num_attention_heads": heads, "vocab_size": 64}
    config |= {"num_hidden_layers": 1, "intermediate_size": 64, "max_position_embeddings": TOKENS, "rotary_pct": share}
    block = next(layer for layer in from_hf(config, implementation="eager").layers if layer.kind == "block")
    kernels = [kernel for kernel in block.kernels if kernel.name.startswith("rotary")]
    rows = torch.randn(4, TOKENS, heads * dim, dtype=torch.bfloat16, requires_grad=True)
    turned = int(dim * share)
    cosine = torch.ones(1, 1, TOKENS, turned, dtype=torch.bfloat16)
    with Moved() as ahead:
        queries = rows.view(4, TOKENS, heads, dim).transpose(1, 2)
        part = queries[..., :turned]
        half = torch.cat((-part[..., turned // 2 :], part[..., : turned // 2]), -1)
        result = torch.cat([part * cosine + half * cosine, queries[..., turned:]], -1)
    gradient = torch.ones_like(result)
    with Moved() as back:
        result.backward(gradient)
    both = 4 / 2  # samples there, queries and keys here
    assert sum(kernel.nbytes for kernel in kernels) == pytest.approx(ahead.elements / both, rel=0.01)
    assert sum(kernel.backward_nbytes for kernel in kernels) == pytest.approx(back.elements / both, rel=0.05)


def test_a_share_of_a_head_that_nobody_says_is_the_classes_and_said() -> None:
    phi = random_config("phi", random.Random(1)) | {"hidden_size": 512, "num_attention_heads": 8}
    phi = {name: value for name, value in phi.items() if name not in {"partial_rotary_factor", "rope_parameters"}}
    rotations = {}
    for share in (None, 0.25, 1.0):
        made = from_hf(phi if share is None else phi | {"partial_rotary_factor": share}, seq_len=TOKENS)
        block = next(layer for layer in made.layers if layer.kind == "block")
        rotations[share] = sum(kernel.nbytes for kernel in block.kernels if kernel.name == "rotary")
        assert any("partial_rotary_factor 0.5" in note for note in made.notes) == (share is None)
    assert rotations[None] == rotations[1.0] / 2 == 2 * rotations[0.25]
    with pytest.raises(ModelError, match="'partial_rotary_factor' = 2 must be a number above zero, at most 1"):
        from_hf(phi | {"partial_rotary_factor": 2})
