"""Bytes one GPU holds at the peak of a training step whose model is whole on it, or sharded by layers."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.device import Device
from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.holding import Holding, always, everything
from clustersim.core.holding import moments as moments_of
from clustersim.core.memory_use import MemoryCourse, MemoryUse
from clustersim.core.model import AUTOCAST, FULL, HALF, Kernel, Layer, Model
from clustersim.core.optimizers import OPTIMIZERS, state_bytes, workspace_bytes
from clustersim.core.program import DTYPE_BYTES
from clustersim.model.kernels import EAGER_LOSS, FUSED_LOSS, saved_by_operator
from clustersim.model.seconds.base import check_checkpointing


@dataclass(frozen=True, kw_only=True)
class Training:
    """What of a run decides the memory of its steps.

    Parameters
    ----------
    micro_batch_size : samples in flight. dtype : of the GEMMs. param_dtype : of parameters and gradients; fp32 with a
        16-bit ``dtype`` is autocast, which keeps norm inputs in fp32 and a 16-bit copy of every weight. trained_dtype :
        of what is trained, where what is frozen has another type.
    activation_checkpointing : ``none``, ``full`` (block inputs only) or ``selective`` (torchtitan's per-op policy).
    optimizer : a row of :data:`~clustersim.core.optimizers.OPTIMIZERS`, or None. master_weights : it keeps fp32 copies
        and states of 16-bit parameters.
    compiled : ``torch.compile`` has fused the loss. offloaded : what layers keep is on the host between their passes.
    holding : what a strategy keeps on one rank; everything whole, and ``master_weights``, where it is None.
    gpu : whose memory it is, which parts that are computed depend on (:mod:`clustersim.core.memory_parts`).

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
    trained_dtype: str | None = None
    offloaded: bool = False
    gpu: Device | None = None

    def __post_init__(self) -> None:
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            suggestion = nearest(str(self.optimizer), OPTIMIZERS)
            raise ScenarioError(f"unknown optimizer {self.optimizer!r} (at $.run.optimizer); {suggestion}")
        check_checkpointing(self.activation_checkpointing)
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
    types = types_of(run.dtype, run.param_dtype)
    size = DTYPE_BYTES[run.trained_dtype or run.param_dtype]
    holding = run.holding or everything(model.gradients, size, masters=run.master_weights, frozen=model.frozen_bytes)
    activations = _activations(model, run, types, size if holding.fresh else 0)
    n = len(model.layers)
    # A checkpointed block's copies go with its activations.
    policy = run.activation_checkpointing
    kept_whole = [policy == "none" or layer.kind != "block" for layer in model.layers]
    copies = np.array(
        [2.0 * _cast(layer) * (types == AUTOCAST and k) for layer, k in zip(model.layers, kept_whole, strict=True)]
    )
    moments = np.arange(2 * n + 1)
    unpacked = np.array([2.0 * max((t.numel for t in x.tensors if t.quantised), default=0) for x in model.layers])
    states, workspace = _optimizer_bytes(model, run, holding)
    course = MemoryCourse.of(
        moments_of([layer.name for layer in model.layers]),
        {
            "parameters": always(holding.parameters, n),
            "gathered": holding.gathered,
            "weight_copies": _kept(copies) + np.concatenate([unpacked, unpacked[::-1], [0.0]]),
            "master_weights": always(holding.masters, n),
            "gradients": holding.gradients - activations.missing * (holding.fresh == "gradients"),
            "optimizer_states": always(states, n),
            "buckets": holding.buffers - activations.missing * (holding.fresh == "buffers"),
            "activations": activations.layers,
            "logits": activations.logits,
            "optimizer_workspace": np.where(moments == 2 * n, workspace, 0.0),
        },
        run.gpu,
    )
    return MemoryUse(course, host_bytes=_host_bytes(model, run, holding))


def _optimizer_bytes(model: Model, run: Training, holding: Holding) -> tuple[float, float]:
    """Bytes of states on this rank, and of what its step holds besides: foreach Adam one list of denominators of the
    parameters' size. Paged states are in nobody's allocator."""
    row = OPTIMIZERS[run.optimizer] if run.optimizer is not None else None
    if row is None:
        return 0.0, 0.0
    share = holding.updated / max(1, model.trained)
    element = float(holding.state_bytes)
    states = 0.0 if row.paged else state_bytes(model, row.name, element) * share
    if run.optimizer_impl == "foreach" and row.two_states:
        return states, element * holding.updated
    return states, workspace_bytes(model, row.name, element)


def _host_bytes(model: Model, run: Training, holding: Holding) -> float:
    """What a rank keeps on its host: of its states, and of the activations of a micro-batch between its passes."""
    row = OPTIMIZERS[run.optimizer] if run.optimizer is not None else None
    states = 0.0
    if row is not None and holding.away:
        states = state_bytes(model, row.name, float(holding.state_bytes)) * holding.away / max(1, model.trained)
    activations = float(kept_by_layer(model, run).sum()) if run.offloaded else 0.0
    return holding.away_bytes + states + activations


def _kept(by_layer: Floats) -> Floats:
    """What forward leaves behind for backward, which gives it back: bytes at every moment."""
    ahead = np.cumsum(by_layer)
    return np.concatenate([ahead, ahead[::-1], [0.0]])


def _windowed(by_layer: Floats) -> Floats:
    """What is there where the host keeps the rest: of a layer and of the one before it, which is on its way."""
    present = by_layer + np.concatenate([[0.0], by_layer[:-1]])
    return np.concatenate([present, present[::-1], [0.0]])


def kept_by_layer(model: Model, run: Training) -> Floats:
    """(layers,) float [bytes] that a micro-batch keeps from each layer's forward to its backward, logits apart."""
    types = types_of(run.dtype, run.param_dtype)
    saved, outputs = _saved(model, run, types, _each(model, run, types, 0))
    return saved + outputs


def types_of(dtype: str, param_dtype: str) -> int:
    """Which of :data:`~clustersim.core.model.ByteSizes` a run's tensors have."""
    if dtype not in {"fp16", "bf16", "fp8"}:
        return FULL
    return AUTOCAST if param_dtype == "fp32" else HALF


def _cast(layer: Layer) -> int:
    """Elements of weights that autocast casts: of products, so of no table that is looked up; a tied one is cast where
    it is multiplied by."""
    if layer.kind == "embedding":
        return sum(k.n * k.k for k in layer.kernels if k.kind == "gemm")
    return sum(tensor.numel for tensor in layer.tensors)


class LayerBytes(msgspec.Struct, frozen=True):
    """Bytes of a layer.

    ``kept``, ``logits`` : from forward to backward, of the layer and of its loss. ``most``, ``most_logits`` : at the
    fullest moment of its backward. ``missing`` : of its parameters' gradients, those that are not there at that moment.
    """

    kept: float
    most: float
    logits: float = 0.0
    most_logits: float = 0.0
    missing: float = 0.0

    @property
    def total(self) -> float:
        """At the fullest moment, without gradients that are there."""
        return self.most + self.most_logits - self.missing


class Activations(msgspec.Struct, frozen=True, eq=False):
    """(2 L + 1,) float [bytes] at every moment: of the ``layers``, of the ``logits``, and gradients ``missing``."""

    layers: Floats
    logits: Floats
    missing: Floats


def _activations(model: Model, run: Training, types: int, gradient: int) -> Activations:
    """Bytes kept from forward to backward.

    Under checkpointing a block keeps its input (fp32 under autocast), and one block at a time is whole again.
    ``gradient`` : bytes of an element of gradients, 0 where all are there all the time.
    """
    policy = run.activation_checkpointing
    n = len(model.layers)
    by_layer = _each(model, run, types, gradient)
    saved, outputs = _saved(model, run, types, by_layer)
    layers = _windowed(saved + outputs) if run.offloaded else _kept(saved + outputs)
    logits = _kept(np.array([nbytes.logits for nbytes in by_layer]))
    missing = np.zeros(2 * n + 1)
    for i, (layer, nbytes) in enumerate(zip(model.layers, by_layer, strict=True)):
        moment = 2 * n - 1 - i
        checkpointed = policy != "none" and layer.kind == "block"
        layers[moment] += nbytes.most - (outputs[i] if checkpointed else saved[i])
        logits[moment] += nbytes.most_logits - nbytes.logits
        missing[moment] = min(nbytes.missing, gradient * model.gradients[i])
    return Activations(layers, logits, missing)


def _each(model: Model, run: Training, types: int, gradient: int) -> list[LayerBytes]:
    """Of each layer, without checkpointing; those that differ in name alone are looked at once."""
    known: dict[object, LayerBytes] = {}
    each = []
    for layer in model.layers:
        alike = layer.kind, id(layer.kernels), layer.activation_bytes, layer.boundary_bytes
        if alike not in known:
            known[alike] = layer_bytes(layer, run, types, gradient)
        each.append(known[alike])
    return each


def _saved(model: Model, run: Training, types: int, by_layer: list[LayerBytes]) -> tuple[Floats, Floats]:
    """(layers,) float [bytes] that are kept of each layer, a checkpointed block's input; and outputs kept beside it."""
    policy = run.activation_checkpointing
    element = (2.0 if types == HALF else 4.0) * run.micro_batch_size
    product = (4.0 if types == FULL else 2.0) * run.micro_batch_size
    saved = np.array([nbytes.kept for nbytes in by_layer])
    outputs = np.zeros(len(saved))
    for i, layer in enumerate(model.layers):
        if policy != "none" and layer.kind == "block" and layer.has_backward:
            saved[i] = layer.boundary_bytes * element
            outputs[i] = product * _kept_outputs(layer) if policy == "selective" else 0.0
    return saved, outputs


def layer_bytes(layer: Layer, run: Training, types: int, gradient: int) -> LayerBytes:
    """What a layer keeps of a micro-batch, and what its backward holds at the fullest, going through its kernels from
    the last to the first: what is still kept, what the current one works with, and the gradient of the layer's output.
    ``gradient`` : bytes of an element of the parameters' gradients."""
    if not layer.has_backward:
        return LayerBytes(0.0, 0.0)
    if not any(kernel.saved for kernel in layer.kernels):
        return _told_bytes(layer, run, types)
    batch = run.micro_batch_size
    bytes_of = [tuple(batch * size for size in _bytes_of(kernel, run, types)) for kernel in layer.kernels]
    keeps = sum(size for kernel, (size, _) in zip(layer.kernels, bytes_of, strict=True) if not is_loss(kernel))
    logits = sum(size for kernel, (size, _) in zip(layer.kernels, bytes_of, strict=True) if is_loss(kernel))
    stream = batch * layer.boundary_bytes * (2.0 if types == HALF else 4.0)
    left, losses = keeps, logits
    missing = float(gradient * sum(weights(kernel) for kernel in layer.kernels))
    moments = [LayerBytes(keeps, keeps, logits, logits, missing)]
    for kernel, (size, working) in zip(reversed(layer.kernels), reversed(bytes_of), strict=True):
        if is_loss(kernel):
            moments.append(LayerBytes(keeps, left, logits, losses + working, missing))
            losses -= size
        else:
            moments.append(LayerBytes(keeps, left + stream + working, logits, losses, missing))
            left -= size
        missing -= gradient * weights(kernel)
    return max(moments, key=lambda moment: moment.total)


def _bytes_of(kernel: Kernel, run: Training, types: int) -> tuple[float, float]:
    """Bytes per sample that a kernel keeps, and that its backward works with; a compiled loss is one kernel."""
    if run.compiled and types != FULL and is_loss(kernel):
        return FUSED_LOSS / 2.0 * kernel.saved, 0.0
    return kernel.kept_bytes(types), kernel.working[types]


def is_loss(kernel: Kernel) -> bool:
    """Whether it is what stands behind the logits."""
    return kernel.kind == "memory" and kernel.cut == "vocab"


def _told_bytes(layer: Layer, run: Training, types: int) -> LayerBytes:
    """Of a layer whose kernels do not say what they keep."""
    batch = run.micro_batch_size
    if layer.kind in {"head", "loss"}:
        most = FUSED_LOSS if run.compiled and types != FULL else EAGER_LOSS
        logits = batch * most / 2.0 * layer.activation_bytes
        return LayerBytes(0.0, 0.0, logits, logits)
    element = 4.0 if types == FULL else 2.0
    # Two norms of a block keep their fp32 input under autocast.
    norms = 4.0 * layer.boundary_bytes if types == AUTOCAST and layer.kind == "block" else 0.0
    keeps = batch * (element * layer.activation_bytes + norms)
    return LayerBytes(keeps, keeps)


def weights(kernel: Kernel) -> int:
    """Elements of the weights of a product whose gradients backward makes."""
    if kernel.cut == "vocab" and kernel.repeat > 1:
        return 0  # made with the logits
    plain = kernel.kind == "gemm" and not kernel.batch and "W" in kernel.halves
    return kernel.n * kernel.k * kernel.repeat if plain else 0


def _kept_outputs(layer: Layer) -> float:
    """Elements per sample that torchtitan's per-op policy keeps."""
    saved_kernels = [layer.kernels[i] for i in sorted(saved_by_operator(layer.kernels))]
    attention = [kernel for kernel in saved_kernels if kernel.kind == "attention"]
    outputs = float(sum(k.m * k.n * max(1, k.batch) for k in saved_kernels if k.kind == "gemm"))
    return outputs + float(sum(k.heads * k.head_dim * k.seq for k in attention))
