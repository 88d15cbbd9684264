"""Attention as a GPU runs it: one fused kernel where PyTorch has one for these operands, else its products and softmax.

Which kernels take which operands is what ``can_use_flash_attention`` and ``can_use_mem_efficient_attention`` of ATen's
``sdp_utils.cpp`` ask, on a GPU since Ampere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from clustersim.model.tracing.recorder import Recorder

ATTENTION = torch.nn.functional.scaled_dot_product_attention
HALF = frozenset({torch.float16, torch.bfloat16})
WIDEST_FLASH = 256
"""Elements of a head that FlashAttention takes at most."""
_ALIGNED_BYTES = 16
"""Of a head, of which the memory-efficient kernel takes whole multiples (``minimum_gemm_alignment``), and of a row of
its mask, which is filled up (``pad_bias``)."""


class AttentionCall(NamedTuple):
    """The arguments of ``scaled_dot_product_attention`` that matter here, whichever way they were given."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    grouped: bool

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        return self.queries, self.keys, self.values

    @property
    def square(self) -> bool:
        """Whether there are as many queries as keys."""
        return self.queries.shape[-2] == self.keys.shape[-2]


def attention_call(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """The call, in the types that autocast gives its operands."""
    call = AttentionCall(query, key, value, attn_mask, is_causal, enable_gqa)
    if not torch.is_autocast_enabled("cpu"):
        return call
    half = torch.get_autocast_dtype("cpu")
    mask = attn_mask.to(half) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    return AttentionCall(query.to(half), key.to(half), value.to(half), mask, is_causal, enable_gqa)


def unfused_reason(call: AttentionCall) -> str:
    """Why no fused kernel takes a call; empty where one does."""
    dimensions = {tensor.dim() for tensor in call.operands}
    if dimensions != {4}:
        return f"its operands have {min(dimensions)} dimensions, not 4 (samples, heads, tokens, elements)"
    samples = {int(tensor.shape[0]) for tensor in call.operands}
    if len(samples) > 1:
        return "its operands have different numbers of samples"
    heads, key_heads, value_heads = (int(tensor.shape[1]) for tensor in call.operands)
    if not (heads == key_heads == value_heads) and not call.grouped:
        return "its operands have different numbers of heads"
    mask = () if call.mask is None else (call.mask,)
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in (*call.operands, *mask)):
        return "the elements of a head, or of a row of its mask, do not lie side by side (.contiguous() lays them so)"
    half = call.queries.dtype in HALF
    if half and flash_takes(call) and torch.backends.cuda.flash_sdp_enabled():
        return ""
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        return "the module switches the fused kernels off"
    element = call.queries.element_size()
    width, _, value_width = (int(tensor.shape[-1]) for tensor in call.operands)
    if not half and call.queries.dtype is not torch.float32:
        return f"its operands are of {call.queries.dtype}"
    if width * element % _ALIGNED_BYTES or value_width * element % _ALIGNED_BYTES:
        return f"a head's elements are no multiple of {_ALIGNED_BYTES // element}"
    return ""


def flash_takes(call: AttentionCall) -> bool:
    """Whether FlashAttention has room for a call, in 16 bits: no mask, heads of one width, a whole triangle."""
    widths = {int(tensor.shape[-1]) for tensor in call.operands}
    triangle = call.square or not call.causal
    return call.mask is None and triangle and len(widths) == 1 and max(widths) <= WIDEST_FLASH


def run_attention(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``scaled_dot_product_attention`` as a GPU does."""
    call = attention_call(*args, **kwargs)
    reason = unfused_reason(call)
    if reason:
        recorder.unfused.add(reason)
        with sdpa_kernel(SDPBackend.MATH):
            return ATTENTION(*args, **kwargs)
    return FusedAttention.apply(recorder, *call.operands, _added(call), call)


def _added(call: AttentionCall) -> torch.Tensor | None:
    """What is added to the scores, for every head: numbers in place of a mask of bools, its rows filled up."""
    if call.mask is None:
        return None
    mask = call.mask
    if mask.dtype is torch.bool:
        nothing = torch.zeros((), dtype=call.queries.dtype)
        mask = torch.where(mask, nothing, torch.full((), -torch.inf, dtype=call.queries.dtype))
    keys = int(mask.shape[-1])
    missing = -keys % (_ALIGNED_BYTES // call.queries.element_size())
    if missing:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., :keys]
    return mask.expand(*call.queries.shape[:2], call.queries.shape[-2], call.keys.shape[-2])


class FusedAttention(torch.autograd.Function):
    """A fused kernel: what it keeps is its operands, its output and a sum in fp32 for each row of scores."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, queries: Any, keys: Any, values: Any, mask: Any, call: AttentionCall
    ) -> Any:
        """The output, with the heads of a token side by side, as CUDA's kernels lay it."""
        shape = (*queries.shape[:-3], queries.shape[-2], queries.shape[-3], values.shape[-1])
        out = queries.new_empty(shape).transpose(-2, -3)
        sums = queries.new_empty(queries.shape[:-1], dtype=torch.float32)
        recorder.attention((queries, keys, values), mask, [out, sums], causal=call.causal, flash=flash_takes(call))
        event = recorder.trace.events[-1]
        ctx.recorder = recorder
        ctx.cost = (event.flops, event.nbytes)
        ctx.save_for_backward(queries, keys, values, out, sums, mask)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Gradients of queries, keys and values, and of what was added to the scores, for every head."""
        *operands, _, _, mask = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in operands]
        if ctx.needs_input_grad[4]:
            gradients.append(torch.empty(mask.shape, dtype=mask.dtype))
        ctx.recorder.attention_backward(gradients, *ctx.cost)
        of_mask = gradients[3] if len(gradients) > len(operands) else None
        return None, *gradients[:3], of_mask, None
