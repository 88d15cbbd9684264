"""How PyTorch on a GPU differs from the CPU whose tensors a trace fakes: fused attention
(:mod:`clustersim.model.tracing.fused_attention`) and root-mean-square norms, and what autocast widens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_map

from clustersim.model.tracing.fused_attention import ATTENTION, HALF, run_attention
from clustersim.model.tracing.recorder import Recorder
from clustersim.model.tracing.traffic import OPERATORS

DROPOUT = torch.nn.functional.dropout
CALLED_BY_ATTENTION = ("scaled_dot_product_attention", "dropout", "softmax")
"""What ``multi_head_attention_forward`` of torch.nn.functional calls and a GPU runs otherwise than a CPU."""

RMS_NORMS = frozenset({torch.nn.functional.rms_norm, torch.rms_norm})


class GpuFunctions(TorchFunctionMode):
    """Attention as one fused kernel, ``rms_norm`` as another; and under autocast, fp32 where CUDA has it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch's."""
        named = dict(kwargs or {})
        if func is ATTENTION:
            return run_attention(self.recorder, args, named)
        if func is DROPOUT:
            return _dropout(*args, **named)
        if func is torch.nn.functional.multi_head_attention_forward:
            with self._within_attention():
                return func(*args, **named)
        if torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "") in OPERATORS.widened:
            args, named = tree_map(_widened, (args, named))
        if func in RMS_NORMS:
            return self._norm(func, args, named)
        return func(*args, **named)

    @contextmanager
    def _within_attention(self) -> Iterator[None]:
        """What ``nn.MultiheadAttention`` calls comes here too: PyTorch asks no mode from within a mode's call."""
        module: Any = torch.nn.functional
        before = {name: getattr(module, name) for name in CALLED_BY_ATTENTION}

        def asked(func: Any) -> Any:
            """The function, asked of this mode."""
            return lambda *args, **kwargs: self.__torch_function__(func, (), args, kwargs)

        try:
            for name, func in before.items():
                setattr(module, name, asked(func))
            yield
        finally:
            for name, func in before.items():
                setattr(module, name, func)

    def _norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A CPU runs its operators one by one, and so does CUDA where input and weight differ in type."""
        inputs, shape, weight = _norm_operands(*args, **kwargs)
        if weight is not None and weight.dtype != inputs.dtype:
            return func(*args, **kwargs)
        return FusedNorm.apply(self.recorder, inputs, weight, len(shape))


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """A dropout that keeps a mask of one byte an element, and not of the tensor's type."""
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _widened(leaf: Any) -> Any:
    narrow = isinstance(leaf, torch.Tensor) and leaf.dtype in HALF
    return leaf.float() if narrow else leaf


def _norm_operands(
    input: Any, normalized_shape: tuple[int, ...], weight: Any = None, eps: float | None = None
) -> tuple[Any, tuple[int, ...], Any]:
    """The arguments of ``rms_norm`` by place, whichever way they were given."""
    return input, normalized_shape, weight


class FusedNorm(torch.autograd.Function):
    """``aten._fused_rms_norm`` as CUDA has it: it keeps its input, its weight and a factor of each row in fp32."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, inputs: Any, weight: Any, axes: int) -> Any:
        """The norm over the last ``axes`` dimensions."""
        out = torch.empty_like(inputs)
        factors = inputs.new_empty((*inputs.shape[:-axes], *(1,) * axes), dtype=torch.float32)
        recorder.fused(torch.ops.aten._fused_rms_norm.default, (inputs, weight), (out, factors))
        ctx.recorder = recorder
        ctx.save_for_backward(inputs, factors, weight)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Gradients of input and weight."""
        operands = ctx.saved_tensors
        inputs, _, weight = operands
        gradients = (torch.empty_like(inputs), None if weight is None else torch.empty_like(weight))
        backward = torch.ops.aten._fused_rms_norm_backward.default
        ctx.recorder.record(backward, (gradient, *operands), {}, gradients)
        return None, *gradients, None


@contextmanager
def without_checkpoints() -> Iterator[list[str]]:
    """Run what ``torch.utils.checkpoint`` wraps as if it were not wrapped; the list is not empty once something was."""
    seen: list[str] = []

    def generator(fn: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        """The decorator's: the call as it stands."""
        seen.append(getattr(fn, "__qualname__", "a function"))
        yield

    def applied(fn: Any, preserve: bool, *args: Any) -> Any:
        """The function's: the call as it stands."""
        seen.append(getattr(fn, "__qualname__", "a function"))
        return fn(*args)

    module: Any = checkpoint
    before = module._checkpoint_without_reentrant_generator
    module._checkpoint_without_reentrant_generator = generator
    module.CheckpointFunction.apply = staticmethod(applied)
    try:
        yield seen
    finally:
        module._checkpoint_without_reentrant_generator = before
        del module.CheckpointFunction.apply
