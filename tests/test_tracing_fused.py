"""A trace says what a GPU runs and not what the CPU that it is made on would: a norm is one kernel, as CUDA has it."""

from __future__ import annotations

import msgspec
import pytest
from conftest import ROOT

import clustersim
from clustersim.model import model
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
