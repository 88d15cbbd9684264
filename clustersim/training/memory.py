"""Bytes one GPU holds at the peak of a training step whose model is whole on it, or sharded by layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.holding import Holding, always, everything
from clustersim.core.holding import moments as moments_of
from clustersim.core.memory_use import MemoryCourse, MemoryUse
from clustersim.core.model import Layer, Model
from clustersim.core.program import DTYPE_BYTES

STATES = {None: 0, "sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2, "lamb": 2}
"""Tensors of the parameters' size that an optimizer keeps."""
COMPILED_LOSS = 0.4
"""Of the bytes that an eager loss holds in 16 bits, what a fused one does: the logits and their gradient, 4 of 10 bytes
a logit (pytorch/torchtitan PR 1033; Dao-AILab/quack issue 48)."""
CHECKPOINTING = ("none", "full", "selective")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What of a run decides the memory of its steps.

    Parameters
    ----------
    micro_batch_size : samples in flight. dtype : of the GEMMs. param_dtype : of parameters and gradients; fp32 with a
        16-bit ``dtype`` is autocast, which keeps norm inputs in fp32 and a 16-bit copy of every weight.
    activation_checkpointing : ``none``, ``full`` (block inputs only) or ``selective`` (torchtitan's per-op policy).
    optimizer : a key of :data:`STATES`. master_weights : it keeps fp32 copies and states of 16-bit parameters.
    compiled : ``torch.compile`` has fused the loss.
    holding : what a strategy keeps on one rank; everything whole, and ``master_weights``, where it is None.

    Raises :class:`ScenarioError` for an unknown optimizer or policy.
    """

    micro_batch_size: int
    dtype: str = "bf16"
    param_dtype: str = "fp32"
    activation_checkpointing: str = "none"
    optimizer: str | None = "adamw"
    optimizer_impl: str = "foreach"
    master_weights: bool = False
    compiled: bool = False
    holding: Holding | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in STATES:
            known = nearest(str(self.optimizer), [name for name in STATES if name])
            raise ScenarioError(f"unknown optimizer {self.optimizer!r} (at $.run.optimizer); {known}")
        if self.activation_checkpointing not in CHECKPOINTING:
            known = nearest(self.activation_checkpointing, CHECKPOINTING)
            raise ScenarioError(f"unknown activation_checkpointing {self.activation_checkpointing!r}; {known}")
        if self.micro_batch_size < 1:
            raise ScenarioError(f"micro_batch_size {self.micro_batch_size} must be at least 1")


def memory(model: Model, run: Training) -> MemoryUse:
    """Bytes one GPU holds at the peak of a step, after the first.

    >>> from clustersim.core.model import Layer, Model, Tensor
    >>> tiny = Model("tiny", "mlp", (Layer("fc", "linear", (Tensor("w", 1000),), (), activation_bytes=10.0),))
    >>> run = Training(micro_batch_size=4, dtype="fp32", optimizer="sgd", optimizer_impl="fused")
    >>> memory(tiny, run).allocated
    8160.0
    """
    half = run.dtype in {"fp16", "bf16", "fp8"}
    policy = run.activation_checkpointing
    autocast = half and run.param_dtype == "fp32"
    elements = np.array([float(layer.parameters) for layer in model.layers])
    holding = run.holding or everything(elements, DTYPE_BYTES[run.param_dtype], masters=run.master_weights)
    activations, logits = _activations(model, run.micro_batch_size, policy, half=half, autocast=autocast)
    if half and run.compiled:
        logits = logits * COMPILED_LOSS
    n = len(model.layers)
    # A checkpointed block's copies go with its activations.
    kept_whole = [policy == "none" or layer.kind != "block" for layer in model.layers]
    copies = np.array([2.0 * n.parameters * (autocast and k) for n, k in zip(model.layers, kept_whole, strict=True)])
    moments = np.arange(2 * n + 1)
    # foreach Adam holds one list of denominators of the parameters' size.
    foreach = run.optimizer_impl == "foreach" and STATES[run.optimizer] == 2
    course = MemoryCourse(
        moments_of([layer.name for layer in model.layers]),
        {
            "parameters": always(holding.parameters, n),
            "gathered": holding.gathered,
            "weight_copies": _kept(copies),
            "master_weights": always(holding.masters, n),
            "gradients": holding.gradients,
            "optimizer_states": always(float(holding.state_bytes) * STATES[run.optimizer] * holding.updated, n),
            "buckets": holding.buffers,
            "activations": activations,
            "logits": logits,
            "optimizer_workspace": np.where(moments == 2 * n, holding.state_bytes * holding.updated * foreach, 0.0),
        },
    )
    largest: Any = {name: float(column.max()) for name, column in course.parts.items()}
    return MemoryUse(**largest, course=course)


def _kept(by_layer: Floats) -> Floats:
    """What forward leaves behind for backward, which gives it back: bytes at every moment."""
    ahead = np.cumsum(by_layer)
    return np.concatenate([ahead, ahead[::-1], [0.0]])


def _activations(model: Model, batch: int, checkpointing: str, *, half: bool, autocast: bool) -> tuple[Floats, Floats]:
    """Bytes kept from forward to backward at every moment: of the layers, and of the head.

    Under checkpointing a block keeps its input (fp32 under autocast), and one block at a time is whole again. The loss
    holds logits, an fp32 copy and its log-softmax (10 bytes a logit in 16 bits), or logits, log-softmax and gradient in
    fp32 (12).
    """
    element = 2.0 if half else 4.0
    n = len(model.layers)
    kept = np.zeros(n)
    head = np.zeros(n)
    again = np.zeros(n)
    for i, layer in enumerate(model.layers):
        # Two norms of a block keep their fp32 input under autocast.
        whole = element * layer.activation_bytes + (4.0 * layer.boundary_bytes if autocast else 0.0)
        if layer.kind in {"head", "loss"}:
            head[i] = (5.0 if half else 6.0) * layer.activation_bytes
        elif checkpointing != "none" and layer.kind == "block":
            boundary = layer.boundary_bytes * (4.0 if autocast else element)
            kept[i] = boundary + (element * _kept_outputs(layer) if checkpointing == "selective" else 0.0)
            again[i] = whole
        else:
            kept[i] = whole if layer.kind == "block" else element * layer.activation_bytes
    alive = _kept(kept)
    alive[n : 2 * n] += again[::-1]
    return batch * alive, batch * _kept(head)


def _kept_outputs(layer: Layer) -> float:
    """Elements per sample that torchtitan's per-op policy keeps: fused attention's, and every second product's."""
    products = [kernel for kernel in layer.kernels if kernel.kind == "gemm" and kernel.repeat == 1]
    grouped = [half for k in layer.kernels if k.kind == "gemm" and k.repeat > 1 and (half := k.halved()) is not None]
    attention = [kernel for kernel in layer.kernels if kernel.kind == "attention"]
    outputs = float(sum(k.m * k.n * max(1, k.batch) for k in products[::2]))
    outputs += float(sum(k.m * k.n * k.repeat for k in grouped))
    return outputs + float(sum(k.heads * k.head_dim * k.seq for k in attention))
