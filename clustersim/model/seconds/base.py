"""The constants of the compute model, and the setting a kernel runs in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from clustersim.core.collective_kinds import DTYPE_BYTES
from clustersim.core.device import Device
from clustersim.core.errors import ScenarioError, nearest

HALF = frozenset({"fp16", "bf16", "fp8"})
MODES = ("fp32", "tf32", "fp16", "bf16", "fp8")
ATTENTION_KERNELS = ("eager", "efficient", "fa1", "triton", "fa2", "fa3", "fa4", "cudnn", "aotriton")
IMPLEMENTATIONS = ("eager", "compiled")
CHECKPOINTING = ("none", "full", "selective")
FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4")
"""torchao's names, and Transformer Engine's of recipes with scales of blocks. Its delayed and current scaling are
``tensorwise``."""
BLOCKS: Mapping[str, str] = {"blockwise": "fp8_block", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""Recipes whose scales are of blocks -> arithmetic of the kernel law."""
SINCE: Mapping[str, int] = {"blockwise": 90, "mxfp8": 100, "nvfp4": 100}
"""Of those, the least compute capability (Transformer Engine pytorch/quantization.py,
``_compute_fp8_block_scaling_support`` and its like; ROCm's of it has no blockwise): tensor cores that multiply by the
scales of blocks begin with Blackwell."""
SCALING_AMD = frozenset({"gfx950"})
"""AMD's architectures whose matrix units multiply by scales of blocks of 32 (CDNA 4 instruction set, V_MFMA_SCALE)."""

BLACKWELL = 100
"""Compute capability from which PyTorch's own choice is cuDNN's attention where there is one
(``check_prefer_cudnn_attention`` of ATen's sdp_utils.cpp); releases of Hopper's time took FlashAttention-2."""
UNSLOWED = frozenset({"sm120"})
"""Generations of cards whose steps keep their best measured rate: what A100 and H100 lose under their power limits made
every transformer too slow on RTX 5080, 5090 and PRO 6000 (seven steps of five publishers, by 6 % and more)."""


@dataclass(frozen=True)
class ComputeConstants:
    """Every fitted number of the compute model that is not a device's. None belongs to a GPU, a model or a case.

    Parameters
    ----------
    half_k0, half_c, fp32_k0, fp32_c : prologue steps along k, and the tile-size term, of a GEMM in fp32, and in 16 bits
        before Ampere (:mod:`clustersim.model.seconds.gemm`). Fitted on 584 half-precision and 5,710 fp32 products of
        the compute table with the devices' published rates held; median errors 2-6 % (16 bits), 4-6 % (fp32 linears), 7
        to 21 % (fp32 batched products).
    gemm_memory : share of nominal bandwidth a bandwidth-bound GEMM reaches.
    sum_exposed : where a weight gradient's product adds to the kept gradient, of the shorter of its arithmetic and that
        traffic, what the other does not hide. Megatron's products on A100 and B200, dense and grouped (SimuMax's
        tables): 0.15 to 0.4, one number for all.
    sustained : of the best measured matmul rate, what a training step keeps on tensor cores (power, clocks), from 123
        llm-foundry steps of A100 and H100, where products follow the kernel law. sustained_volta : where they do not.
        sustained_amd : on AMD's, whose best was searched with TunableOp: hipBLASLt by its own choice, forward and
        backward (69 products of MI300X, Primus-Turbo; 14 of MI355X forward, ROCm/aiter pull request 2559: 0.95).
    grouped : of the rate that the law of experts gives tuned kernels, what a grouped product keeps in a step, at the
        level of the device's products (:func:`clustersim.model.seconds.gemm.grouped_parts`). Mixtures on A100 and H100
        (SimuMax, Megatron-Bridge, dgxc, MoE zoo): medians of 4.9 and 15.3 %, 5.5 and 16.0 % with 0.63.
    amd_k0 : half_k0 of AMD's. 22 products of MI355X with k of 256 to 7,168 (ROCm/aiter pull request 2559) spread by 8 %
        with it and by 16 % with 140; 69 of MI300X, all of 3,584 and more, tell no difference.
    grouped_amd : of a plain product's rate, what a grouped one keeps on AMD's: 54 of MI300X by Triton (Primus-Turbo),
        which lose 5 % forward and 12 % backward.
    misaligned : of the tensor-core rate, what is left where 16-bit rows have an odd length (an unpadded vocabulary):
        they can only be loaded two bytes at a time. Transformer-XL's 267,735 words on V100 and A100; it makes a
        compiled GPT-2 22 % slower with 50,257 words than with 50,304, where nanoGPT reports a quarter.
    memory_half, memory_fp32, memory_compiled : share of STREAM that elementwise kernels reach: eager 16-bit (the same
        123 steps, with bytes told by type and attention by its law; V100 steps have the same), eager fp32 and attention
        scores (NeuSight transformer steps, 3.5 % mean error), generated code.
    half_gain, half_a_clock : what eager code gains on ``memory_half`` at most where memory has few bytes for each SM
        (0.96 of STREAM; PyTorch's pull request 141959 measured 0.97), and the elements that an SM moves in a clock, one
        after the other with the memory's time. BERT and Transformer-XL of Lambda's table on RTX 8000, 3090, A6000, 6000
        Ada and 4090 are missed by 7, 14, 21, 16 and 33 % without it and by 6, 12, 16, 13 and 23 % with it; A100 and
        H100 gain nothing. Elements of 4 bytes, which it was not fitted to, have the same law: fp32 and TF32 of those
        models on RTX 8000, A6000 and 4090 are missed by 5.2 % with it and by 7.0 % without, GPTs op by op on L4 by 22
        and 30 %, not 28 and 38.
    memory_images : the same for convolutional networks, whose tensors are large and whose norms are cuDNN's.
        image_flops : in its place for eager 16 bits, FLOP of the fp32 units for each byte. Steps on RTX 3090, 4090,
        A6000 and 6000 Ada by four publishers are missed by 7.5 to 15 % with it, in the mean, and by 10 to 18 % without;
        V100 and A100 as well as before.
    conv_fp32, conv_half : share of the matmul rate convolutions reach. group_fp32, group_half : channels per group at
        which a grouped one reaches half of that. Fitted on ResNet, ResNeXt, VGG and AlexNet steps of V100 and P100
        (ptddp, DeepLearningExamples, Lambda, TensorFlow benchmarks): within 10 % in PyTorch.
    conv_feed : FLOP in 16 bits that an SM's convolutions are fed for in a clock, half of them in TF32. From ResNet-50
        in TF32 and AMP on three A100 boards (Lambda), 730 to 810, where V100 reaches 740 with ``conv_half``. A lower
        share of bandwidth would explain the same rows, but transformers show none since Ampere.
    conv_ampere : in place of conv_half on other makes, and in networks that are not of images.
    first_flash, efficient : of FlashAttention-2's rate by the kernel law, what Triton's kernel and FlashAttention-1
        keep (MPT training on A100 and H100 alike, llm-foundry; FlashAttention-1's charts: 0.42 to 0.61), and the
        memory-efficient kernel. chart_forward, chart_backward : where the law has nothing,
        forward and backward rate over the combined rate of the flash-attention charts. aotriton_backward : in place of
        the latter for PyTorch's kernels on ROCm, whose backward reaches 0.09 to 0.12 of MI355X's peak where Composable
        Kernel's has 0.11 to 0.21 (tests/data/amd_attention.csv).
    per_tensor : float [s], DDP's cost of one copy of one parameter's gradient, into its bucket or back (ptddp).
        step_overhead : float [s] per step.
    jitter_volta, jitter : relative standard deviation of a rank's step: before Ampere, from what 2 to 16 V100s add to
        one (ptddp: 1.0 % median error given the one-GPU time, 1.7 % with 0.015), seen in P100s and K80s too (tfps: 4.6
        to 3.7 %); and since Ampere (llm-foundry: what is left of 8 to 128 GPUs of A100 and H100).
    overlap_slowdown_volta, overlap_slowdown : see :class:`clustersim.core.model.StepCost`; ptddp, and llm-foundry.
    """

    half_k0: float = 140.0
    amd_k0: float = 300.0
    half_c: float = 20.0
    fp32_k0: float = 20.0
    fp32_c: float = 5.0
    gemm_memory: float = 0.75
    sum_exposed: float = 0.3
    sustained: float = 0.91
    sustained_volta: float = 0.95
    sustained_amd: float = 0.88
    grouped: float = 0.6
    grouped_amd: float = 0.9
    misaligned: float = 0.45
    memory_half: float = 0.58
    half_gain: float = 1.66
    half_a_clock: float = 5.2
    memory_fp32: float = 0.75
    memory_compiled: float = 0.85
    conv_fp32: float = 0.74
    conv_half: float = 0.95
    conv_feed: float = 780.0
    conv_ampere: float = 0.48
    group_fp32: float = 8.8
    group_half: float = 73.0
    memory_images: float = 0.86
    image_flops: float = 2.0
    first_flash: float = 0.54
    efficient: float = 0.72
    chart_forward: float = 1.2
    chart_backward: float = 0.94
    aotriton_backward: float = 0.51
    per_tensor: float = 10e-6
    step_overhead: float = 1e-3
    jitter_volta: float = 0.025
    jitter: float = 0.005
    overlap_slowdown_volta: float = 0.3
    overlap_slowdown: float = 0.16


CONSTANTS = ComputeConstants()


@dataclass(frozen=True, eq=False)
class Setting:
    """Where and how kernels run: what every time function takes.

    Parameters
    ----------
    device : the GPU. dtype : of the GEMMs, one of :data:`MODES`.
    autocast : parameters and norms stay fp32 around half-precision GEMMs (``torch.autocast``).
    attention_kernel : of fused attention, one of :data:`ATTENTION_KERNELS`.
    compiled : elementwise kernels are generated (torch.compile), not eager.
    channels_last : no convolution is transposed for; compiled code lays tensors out so by itself
        (``torch._inductor.config.layout_optimization``).
    images : the model is a convolutional network.
    summed_bytes : of an element of the gradient that a weight gradient's product is added to (Megatron's
        ``gradient_accumulation_fusion``); 0 where the product is written.
    float8_recipe : one of :data:`FLOAT8_RECIPES`: whether 8-bit linears have one scale a tensor, a row or a block.
    hosted : the host launches kernels one by one; else a CUDA graph does.
    module_call : float [s] that the host takes to call a module of an adapter, beside the launches; 0 where nobody
        calls one (compiled graphs), or the law of a split model counts it.
    pads_experts : in 8 bits, rows of each expert are copied to where their number is a multiple of what products take.
    expert_streams : a grouped product is a kernel for each expert, on so many streams side by side, and its operands
        are cast one expert after the other; 0 where one kernel has all experts.
    constants : the fitted numbers.
    """

    device: Device
    dtype: str
    autocast: bool = False
    attention_kernel: str = "fa2"
    compiled: bool = False
    channels_last: bool = False
    images: bool = False
    summed_bytes: int = 0
    float8_recipe: str = "tensorwise"
    hosted: bool = True
    module_call: float = 0.0
    pads_experts: bool = False
    expert_streams: int = 0
    constants: ComputeConstants = CONSTANTS

    @property
    def half(self) -> bool:
        """Whether GEMMs run in 16 bits or fewer."""
        return self.dtype in HALF

    @property
    def rowwise(self) -> bool:
        """Whether products run in 8 bits with one scale a row."""
        return self.in_8_bits and self.float8_recipe.startswith("rowwise")

    @property
    def blocks(self) -> str:
        """The kernel law's arithmetic where products run on operands with scales of blocks; else ``""``."""
        return BLOCKS.get(self.float8_recipe, "") if self.in_8_bits else ""

    @property
    def in_8_bits(self) -> bool:
        """Whether products run on operands that were cast to 8 bits or fewer."""
        return self.dtype == "fp8" == self.device.runs_as("fp8")

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation element; fp8 keeps activations in 16 bits."""
        return max(2, DTYPE_BYTES[self.dtype])

    def with_dtype(self, dtype: str) -> Setting:
        """The same setting with GEMMs in another dtype."""
        return self if dtype == self.dtype else replace(self, dtype=dtype)

    @property
    def peak(self) -> float:
        """The device's dense peak [FLOP/s] in the dtype GEMMs run in: what an MFU is of."""
        return self.device.peak["fp4" if self.blocks == "nvfp4" else self.device.runs_as(self.dtype)]

    def matmul_rate(self) -> float:
        """Matmul rate [FLOP/s] that large GEMMs keep inside a training step."""
        runs_as = self.device.runs_as(self.dtype)
        rate = self.device.matmul_rate(self.dtype)
        if runs_as == "fp32":
            return rate
        if self.device.amd:
            return rate * self.constants.sustained_amd
        if self.device.arch in UNSLOWED:
            return rate
        return rate * (self.constants.sustained if self.by_law else self.constants.sustained_volta)

    @property
    def by_law(self) -> bool:
        """Whether products follow the kernel law: it is of tensor cores since Ampere, and nothing speaks for it on
        AMD's: 69 products of MI300X spread by 3 % with it and by 5 % by tiles, 22 of MI355X by 12 and by 9 %, and it
        has grouped ones a fifth too long (tests/data/amd_products.csv)."""
        old = 0 < self.device.sm < 80 or self.device.amd
        return self.device.runs_as(self.dtype) in HALF and not old


@dataclass(frozen=True)
class Execution:
    """How a step is computed.

    Parameters
    ----------
    dtype : of GEMMs and convolutions: fp32 (TF32 off), tf32, fp16, bf16, fp8 (linear layers of blocks, bf16 elsewhere).
    param_dtype : what the model's parameters are in while it computes. fp32 with a 16-bit ``dtype`` is autocast: norms,
        softmax and losses move fp32, and weights are cast in every pass. The same 16-bit type is a converted model, or
        FSDP's mixed precision.
    attention_kernel : one of :data:`ATTENTION_KERNELS`; None takes what scaled_dot_product_attention of PyTorch
        would. It prices fused attention kernels; a model built with eager attention has none.
    activation_checkpointing : ``none``; ``full``, where backward repeats each block's forward; ``selective``, where it
        repeats all but fused attention and every second matrix product (torchtitan's per-op policy).
    early_stop : the repeated forward ends with the last tensor that backward needs.
    optimizer : sgd, sgd_momentum, adam, adamw, lamb, or None. optimizer_impl : fused, foreach or for-loop.
    implementation : ``eager``, or ``compiled`` where elementwise kernels are generated. channels_last : of tensors that
        convolutions read and write; compiled code has them so.
    state_dtype : what the optimizer's parameters and states are in; ``param_dtype`` when None. FSDP and ZeRO compute in
        16 bits and update fp32 shards.
    float8_recipe : one of :data:`FLOAT8_RECIPES`, of dtype fp8.
    layer_time : float [s] that the host takes to launch a block's forward and backward, where it was measured.
    graphed : the whole step is one CUDA graph, which the host launches at once.
    transformer_engine : attention is Transformer Engine's, which ROCm builds on Composable Kernel and AITER, where
        PyTorch has AOTriton's.
    """

    dtype: str = "bf16"
    param_dtype: str = "fp32"
    attention_kernel: str | None = None
    activation_checkpointing: str = "none"
    early_stop: bool = False
    optimizer: str | None = "adamw"
    optimizer_impl: str = "foreach"
    implementation: str = "eager"
    channels_last: bool = False
    state_dtype: str | None = None
    float8_recipe: str = "tensorwise"
    layer_time: float | None = None
    graphed: bool = False
    transformer_engine: bool = False


def check_checkpointing(policy: str) -> None:
    """Raise :class:`ScenarioError` for an unknown way to recompute activations."""
    if policy not in CHECKPOINTING:
        raise ScenarioError(f"unknown activation_checkpointing {policy!r}; {nearest(policy, CHECKPOINTING)}")


def setting(device: Device, how: Execution, constants: ComputeConstants = CONSTANTS) -> Setting:
    """Where and how the kernels of a step run.

    Raises :class:`ScenarioError` for an unknown dtype, implementation or attention kernel, or one the device has not.
    """
    if how.dtype not in MODES:
        raise ScenarioError(f"unknown dtype {how.dtype!r} (at $.model.dtype); {nearest(how.dtype, MODES)}")
    for what, value, known in (
        ("float8_recipe", how.float8_recipe, FLOAT8_RECIPES),
        ("implementation", how.implementation, IMPLEMENTATIONS),
    ):
        if value not in known:
            raise ScenarioError(f"unknown {what} {value!r}; {nearest(value, known)}")
    half = how.dtype in HALF
    # Flash attention is written for 16-bit operands; fp32 falls to the memory-efficient kernel.
    order = ("fa2", "efficient", "eager") if half else ("efficient", "eager")
    if half and device.sm >= BLACKWELL:
        order = ("cudnn", *order)
    if half and not how.transformer_engine:
        order = ("aotriton", *order)
    have = ("eager", *device.attention)
    kernel = how.attention_kernel or next(name for name in order if name in have)
    if kernel not in ATTENTION_KERNELS:
        raise ScenarioError(f"unknown attention kernel {kernel!r}; {nearest(kernel, ATTENTION_KERNELS)}")
    _refuse_blocks(device, how)
    if kernel not in have:
        raise ScenarioError(
            f"attention kernel {kernel!r} does not run on {device.name}; it has {', '.join(have)} "
            "(at $.model.attention)"
        )
    return Setting(
        device,
        how.dtype,
        autocast=half and how.param_dtype == "fp32",
        attention_kernel=kernel,
        compiled=how.implementation == "compiled",
        channels_last=how.channels_last or how.implementation == "compiled",
        float8_recipe=how.float8_recipe,
        hosted=not how.graphed,
        constants=constants,
    )


def _refuse_blocks(device: Device, how: Execution) -> None:
    """Raise for a recipe with scales of blocks that the device's units for 8 bits do not have."""
    since = SINCE.get(how.float8_recipe, 0)
    if not since or how.dtype != "fp8" or "fp8" not in device.peak:
        return
    scales = device.arch in SCALING_AMD
    if scales and how.float8_recipe == "mxfp8":
        return
    if device.sm < since or (how.float8_recipe == "nvfp4" and "fp4" not in device.peak):
        has = ["tensorwise", "rowwise", *(["blockwise"] if device.sm >= SINCE["blockwise"] else [])]
        if scales:
            raise ScenarioError(
                f"float8_recipe {how.float8_recipe!r} is not played on {device.name}: nobody's table says what it "
                f"costs there (at $.model.float8_recipe); it has {', '.join([*has, 'mxfp8'])}"
            )
        raise ScenarioError(
            f"float8_recipe {how.float8_recipe!r} does not run on {device.name}, whose tensor cores do not scale such "
            f"blocks (at $.model.float8_recipe); it has {', '.join(has)}"
        )
