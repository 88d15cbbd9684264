"""A trace says what a GPU runs and not what the CPU that it is made on would: a norm is one kernel, as CUDA has it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from conftest import ROOT

import clustersim
from clustersim.core.device import device
from clustersim.core.model import Kernel
from clustersim.model import model
from clustersim.model.seconds import Execution, setting
from clustersim.model.seconds.kernels import spent
from clustersim.model.traced import read_model_file

pytest.importorskip("torch", reason="needs torch")

from clustersim.model.tracing import trace_model
from clustersim.model.tracing.inputs import read_input
from clustersim.model.tracing.loading import Target, target_of

BATCH, TOKENS, WIDTH = 4, 16, 8
ROWS = BATCH * TOKENS
MODULE = """
import torch
from torch import nn


class Wide(nn.RMSNorm):
    def forward(self, x):
        return torch.rms_norm(x, self.normalized_shape, self.weight.float(), 1e-6)


class Norms(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.norm = Wide(8) if kind == "wide" else nn.RMSNorm(8, elementwise_affine=kind != "bare")

    def forward(self, x):
        return self.norm(self.up(x)).sum()
"""


def norm_kernel(folder, kind, types):
    """The kernel of the norm, and bytes of a sample's element in these types."""
    file = folder / "norms.py"
    file.write_text(MODULE)
    target = Target(*target_of(f"{file}:Norms"), None, {"kind": kind})
    made = trace_model(target, (read_input("floats[4, 16, 8]"),), (types,))
    return next(row for work in made.works for row in work[types].kernels if "norm" in row.name)


@pytest.mark.parametrize(("types", "size"), [("bf16", 2), ("fp32", 4), ("autocast", 4)])
@pytest.mark.parametrize(("kind", "weight"), [("whole", WIDTH), ("bare", 0)])
def test_a_root_mean_square_norm_is_the_kernel_of_cuda(tmp_path, kind, weight, types, size):
    kernel = norm_kernel(tmp_path, kind, types)
    cast = TOKENS * WIDTH * (2 + 4) if types == "autocast" else 0  # fp32, as CUDA's autocast has it
    elements = 2 * TOKENS * WIDTH + weight / BATCH
    casts = int(cast > 0)
    assert (kernel.launches, kernel.backward_launches) == (1 + casts, 2 + casts)
    assert kernel.nbytes == elements * size + TOKENS * 4 + cast
    assert kernel.kept == TOKENS * WIDTH * size + TOKENS * 4  # its input, and a factor of each row in fp32


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_where_input_and_weight_differ_in_type_cuda_runs_operator_by_operator_too(tmp_path):
    assert norm_kernel(tmp_path, "wide", "bf16").launches > 4
    assert norm_kernel(tmp_path, "wide", "fp32").launches == 1


def lesson(reach=4, by_hand=False):
    """A file of lesson 17's module."""
    words = f"{ROOT / 'notebooks' / 'models' / 'mixer.py'}:build"
    target = Target(*target_of(words), None, {"reach": reach, "by_hand": by_hand})
    return trace_model(target, (read_input("tokens[2, 4096]"),), ("bf16",))


@pytest.mark.parametrize(("name", "by_hand"), [("mixer", False), ("mixer-by-hand", True)])
def test_the_files_of_lesson_17_are_what_is_traced_today(name, by_hand):
    kept = read_model_file(ROOT / "notebooks" / "models" / f"{name}.model.json")
    made = lesson(by_hand=by_hand)
    assert made.layers == kept.layers
    assert made.works == kept.works
    assert (made.chained, made.seq_len, made.hidden) == (kept.chained, kept.seq_len, kept.hidden)


def test_a_convolution_of_many_groups_has_two_of_itself_in_its_backward(tmp_path):
    """The counter of torch takes the gradient of its weight for one without groups: 2,048 times too much here. The
    first exercise of lesson 17 rests on it."""
    file = tmp_path / "far.model.json"
    file.write_bytes(msgspec.json.encode(lesson(reach=64)))
    near = model(ROOT / "notebooks" / "models" / "mixer.model.json")
    far = model(file)
    kernel = next(kernel for kernel in far.layers[1].kernels if kernel.kind == "conv")
    assert kernel.flops == 2 * (4096 + 63) * 2048 * 64
    assert kernel.backward_flops == 2 * kernel.flops
    assert 1 < far.parameters / near.parameters < 1.002
    assert 1 < far.flops_per_sample() / near.flops_per_sample() < 1.002
    steps = [
        clustersim.load("fsdp_llama3_8b_64x8_h100", {"model": {"file": str(path), "dtype": "bf16"}}).run()
        for path in (ROOT / "notebooks" / "models" / "mixer.model.json", file)
    ]
    assert steps[1].summary["step_time_s"] > 1.1 * steps[0].summary["step_time_s"]


ATTENTION = """
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention


class Asks(nn.Module):
    def __init__(self, weights=False):
        super().__init__()
        self.up = nn.Linear(64, 64)
        self.attention = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)
        self.weights = weights

    def forward(self, x):
        x = self.up(x)
        return self.attention(x, x, x, need_weights=self.weights)[0].sum()


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 64)
        self.within = nn.Linear(64, 192)
        self.out = nn.Linear(64, 64)

    def forward(self, x):
        parts = self.within(self.up(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in parts)
        return self.out(scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(2)).sum()


class Layer(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(64, 4, 128, batch_first=True)

    def forward(self, x):
        return super().forward(x).sum()
"""
SCORES = 4 * 128 * 128
"""Elements of the scores of a sample: heads, queries, keys."""


def attention_kernels(folder, name, types="bf16", **sizes):
    """The kernels of a step of one of :data:`ATTENTION`."""
    file = folder / "attention.py"
    file.write_text(ATTENTION)
    target = Target(*target_of(f"{file}:{name}"), None, sizes)
    made = trace_model(target, (read_input("floats[2, 128, 64]"),), (types,))
    return [kernel for work in made.works for kernel in work[types].kernels]


@pytest.mark.parametrize("types", ["bf16", "autocast", "fp32"])
def test_attention_within_a_module_of_pytorchs_is_the_fused_kernel_that_it_is_outside(tmp_path, types):
    def fused(name):
        rows = [kernel for kernel in attention_kernels(tmp_path, name, types) if kernel.kind == "attention"]
        return [(row.flops, row.nbytes, row.backward_nbytes, row.kept) for row in rows]

    outside = fused("Calls")
    assert len(outside) == 1
    assert fused("Asks") == outside
    assert len(fused("Layer")) == 1


def test_attention_whose_weights_are_asked_for_keeps_its_scores_and_a_mask_of_a_byte(tmp_path):
    kernels = attention_kernels(tmp_path, "Asks", weights=True)
    assert not any(kernel.kind == "attention" for kernel in kernels)
    kept = sum(kernel.kept for kernel in kernels)
    tokens = 8 * 128 * 64 * 2  # what stands between the products, and no more
    assert 0 <= kept - SCORES * (2 + 1 + 2) < tokens  # of the scores: softmax, mask, what meets the values


OPERANDS = """
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


class Called(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.up = nn.Linear(64, 192)
        self.bias = nn.Parameter(torch.zeros(4, 128, 128))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.up(x).chunk(3, -1))
        return self.attend(q, k, v).float().sum()

    def attend(self, q, k, v):
        tokens = q.shape[2]
        if self.how == "bools":
            seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
            return scaled_dot_product_attention(q, k, v, attn_mask=seen[None, None])
        if self.how == "bias":
            return scaled_dot_product_attention(q, k, v, attn_mask=self.bias.to(q.dtype)[None])
        if self.how == "widths":
            return scaled_dot_product_attention(q, k, v[..., :8])
        if self.how == "fp32":
            return scaled_dot_product_attention(q.float(), k.float(), v.float())
        if self.how == "three":
            return scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        if self.how == "strided":
            return scaled_dot_product_attention(q.mT.contiguous().mT, k, v)
        if self.how == "odd":
            return scaled_dot_product_attention(q[..., :15], k[..., :15], v)
        if self.how == "switched off":
            with sdpa_kernel(SDPBackend.MATH):
                return scaled_dot_product_attention(q, k, v)
        return scaled_dot_product_attention(q, k, v)
"""


def called(folder, how):
    """The file of :data:`OPERANDS`, and kernels of its step in bf16."""
    file = folder / "operands.py"
    file.write_text(OPERANDS)
    made = trace_model(
        Target(*target_of(f"{file}:Called"), None, {"how": how}), (read_input("floats[2, 128, 64]"),), ("bf16",)
    )
    return made, [kernel for work in made.works for kernel in work["bf16"].kernels]


@pytest.mark.parametrize(
    ("how", "flash", "fp32", "more"),
    [
        ("plain", True, False, 0),
        ("bools", False, False, 128 * 128 * 2 / 2),  # its mask in numbers, for both samples
        ("bias", False, False, 0),
        ("widths", False, False, -128 * 4 * 8 * 2),  # half of an output
        ("fp32", True, True, 128 * 64 * 4 * 4 - 128 * 64 * 4 * 2),
    ],
)
def test_a_fused_kernel_runs_where_pytorch_has_one_and_flash_attention_only_where_it_is_written_for(
    tmp_path, how, flash, fp32, more
):
    plain = next(kernel for kernel in called(tmp_path, "plain")[1] if kernel.kind == "attention")
    kernel = next(kernel for kernel in called(tmp_path, how)[1] if kernel.kind == "attention")
    assert (kernel.flash, kernel.fp32) == (flash, fp32)
    assert kernel.kept - plain.kept == more


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("three", "3 dimensions"),
        ("strided", "side by side"),
        ("odd", "no multiple of 8"),
        ("switched off", "switches the fused kernels off"),
    ],
)
def test_attention_that_no_fused_kernel_takes_keeps_its_scores_in_fp32_and_says_why(tmp_path, how, reason):
    made, kernels = called(tmp_path, how)
    assert not any(kernel.kind == "attention" for kernel in kernels)
    assert [kernel.fp32 for kernel in kernels if kernel.name == "product"] == [True, True]
    assert sum(kernel.kept for kernel in kernels) > SCORES * 4
    assert any(reason in note for note in made.notes)


def test_a_fused_kernel_takes_operands_of_equal_samples_and_heads_but_grouped_ones():
    import torch

    from clustersim.model.tracing.fused_attention import attention_call, unfused_reason

    heads = torch.zeros(2, 4, 128, 16, dtype=torch.bfloat16)
    assert unfused_reason(attention_call(heads, heads, heads)) == ""
    assert "numbers of heads" in unfused_reason(attention_call(heads, heads[:, :2], heads[:, :2]))
    assert unfused_reason(attention_call(heads, heads[:, :2], heads[:, :2], enable_gqa=True)) == ""
    assert "numbers of samples" in unfused_reason(attention_call(heads, heads[:1], heads[:1]))


@pytest.mark.parametrize(("name", "kernel"), [("H100-SXM5-80GB", "fa2"), ("B200-SXM-180GB", "cudnn")])
def test_attention_that_flash_attention_has_no_room_for_is_priced_by_the_kernel_that_runs_it(name, kernel):
    row = Kernel("a", "attention", flops=4e9, backward_flops=1e10, nbytes=1e6, heads=32, head_dim=128, seq=2048)
    where = setting(device(name), Execution(dtype="bf16"))
    assert where.attention_kernel == kernel
    plain, masked, wide = (
        sum(spent(where, kernel_row, 4, "F")[:2])
        for kernel_row in (row, replace(row, flash=False), replace(row, fp32=True))
    )
    efficient = sum(spent(replace(where, attention_kernel="efficient"), row, 4, "F")[:2])
    assert masked == (efficient if kernel == "fa2" else plain)
    assert wide > 4 * plain


def test_a_product_in_fp32_among_others_takes_the_time_that_it_takes_in_fp32():
    row = Kernel("p", "gemm", m=4096, n=4096, k=4096, flops=2 * 4096.0**3, backward_flops=4 * 4096.0**3)
    half, full = (setting(device("H100-SXM5-80GB"), Execution(dtype=dtype)) for dtype in ("bf16", "fp32"))
    for part in ("F", "B"):
        assert spent(half, replace(row, fp32=True), 1, part) == spent(full, row, 1, part)
        assert spent(half, row, 1, part)[0] < 0.2 * spent(full, row, 1, part)[0]
