"""Convolutions: implicit GEMMs on tensor cores, Winograd where cuDNN has it in fp32."""

from __future__ import annotations

from clustersim.core.device import Device
from clustersim.core.model import Kernel
from clustersim.model.seconds.base import Setting
from clustersim.model.seconds.memory_bound import traffic_rate

# 3x3 and 5x5 windows of stride 1, which cuDNN runs as Winograd or FFT tiles.
_FAST_WINDOWS = (9.0, 25.0)
_SPARED, _SPARED_APART = 2.25, 4.0
"""Times fewer products of Winograd's F(2x2, 3x3) and F(4x4, 3x3): 16 for 36, and 36 for 144."""
_TRANSFORMED = 1.0 + 36.0 / 16.0
"""Bytes that the transforms of F(4x4, 3x3) move, of those of input and output: 16 elements are read and 36 written, or
the reverse."""
FIRST_TENSOR_CORES = 70
"""Compute capability, times ten, from which convolutions run on tensor cores: Volta's."""
_TILE, _MATRIX_TILE = 128 * 128, 256 * 128
"""Elements that a block of cuDNN's large kernels makes, in fp32 and on tensor cores (``scudnn_128x128``,
``s884cudnn_256x128``): too few images to give each SM one leave SMs without work. In fp32, steps of V100 with 16 to 128
images are missed by 1 to 4 % with it (four publishers, medians), and by 2 to 11 % without."""


def conv_parts(setting: Setting, kernel: Kernel, batch: float, *, backward: bool) -> tuple[float, float]:
    """Seconds of arithmetic and of memory traffic of a convolution, without the kernel floor.

    In fp32, cuDNN runs a 3x3 convolution of stride 1 as Winograd F(2x2, 3x3) in one kernel, or as F(4x4, 3x3) with
    kernels that transform input and output in memory, whichever is faster (Lavin and Gray, arXiv:1509.09308): few
    channels of large images gain less than many of small ones, and a GPU with little memory bandwidth less than
    another. Tensor cores want channels last: where tensors are not, input and output are transposed around each 16-bit
    convolution.
    """
    constants = setting.constants
    half = setting.half
    rate = _rate(setting)
    if kernel.groups > 1:
        # A group's few channels fill only part of a tile.
        rate *= kernel.n / (kernel.n + (constants.group_half if half else constants.group_fp32))
    flops = (kernel.backward_flops if backward else kernel.flops) * batch
    nbytes = (kernel.backward_nbytes if backward else kernel.nbytes) * batch * setting.element_bytes
    compute = flops / rate * _share_of_waves(setting, kernel, batch, backward=backward)
    memory = nbytes / (setting.device.memory_bandwidth * constants.gemm_memory)
    if is_winograd(setting.device, setting.dtype, kernel):
        compute = min(compute / _SPARED, compute / _SPARED_APART + memory * _TRANSFORMED)
    if half and not setting.channels_last:
        # A transpose reads and writes what the convolution reads and writes once.
        transposes = 2.0 * nbytes / traffic_rate(setting, setting.element_bytes)
        return compute + transposes, memory + transposes
    return compute, memory


def is_winograd(device: Device, dtype: str, kernel: Kernel) -> bool:
    """Whether cuDNN runs a convolution by a fast algorithm, with fewer products than its FLOPs say.

    The matrix units of AMD's first two generations multiply fp32 too, twice as fast as the vector units that a fast
    algorithm would run on (data sheets of MI100 to MI250X): what it spares, they make up.
    """
    if device.runs_as(dtype) != "fp32" or device.fp32_matrices:
        return False
    return kernel.groups == 1 and window_overlap(kernel) in _FAST_WINDOWS


def _rate(setting: Setting) -> float:
    """Products of a convolution [FLOP/s]: a share of the matmul rate, and no more than an SM can be fed with.

    An SM reads as many bytes from its shared memory in a clock since Volta, while its tensor cores multiply two and
    four times as much: an A100's convolutions are fed, not multiplied, and so are an H100's. A card whose products
    with fp32 accumulation run at half rate (GeForce, A10G) waits for its tensor cores.
    """
    constants, gpu = setting.constants, setting.device
    as_run = gpu.runs_as(setting.dtype)
    if as_run == "fp32":
        return setting.matmul_rate() * constants.conv_fp32
    if not gpu.sm or (setting.half and not setting.images):
        return setting.matmul_rate() * constants.conv_ampere
    multiplied = setting.matmul_rate() * constants.conv_half
    if gpu.sm < FIRST_TENSOR_CORES:
        return multiplied
    return min(multiplied, constants.conv_feed * (0.5 if as_run == "tf32" else 1.0) * gpu.sms * gpu.clock)


def _share_of_waves(setting: Setting, kernel: Kernel, batch: float, *, backward: bool) -> float:
    """How many times as long a convolution takes as on a GPU that its tiles fill, 1 for many images.

    The tiles of the forward are of the output, those of the input's gradient of the input; the gradient of weights sums
    over all images, and is split along them.
    """
    outputs = float(kernel.m) * kernel.n * kernel.groups
    if not backward:
        return _partly_filled(setting, outputs * batch)
    if kernel.backward_flops < 1.5 * kernel.flops:  # the first layer's input needs no gradient
        return 1.0
    return (1.0 + _partly_filled(setting, (kernel.nbytes - outputs) * batch)) / 2.0


def unfilled(setting: Setting, kernel: Kernel, batch: float, *, backward: bool) -> float:
    """Share of a convolution's arithmetic that twice as many images would each save, by SMs that have no work now."""
    twice = _share_of_waves(setting, kernel, 2.0 * batch, backward=backward)
    return 1.0 - twice / _share_of_waves(setting, kernel, batch, backward=backward)


def _partly_filled(setting: Setting, elements: float) -> float:
    gpu = setting.device
    tensor_cores = gpu.sm >= FIRST_TENSOR_CORES and gpu.runs_as(setting.dtype) != "fp32"
    full = elements / (_MATRIX_TILE if tensor_cores else _TILE) / gpu.sms
    return (full**4 + 1.0) ** 0.25 / full if full > 0 else 1.0


def window_overlap(kernel: Kernel) -> float:
    """Window positions that read one input pixel: window area over stride squared, 9 for a 3x3 of stride 1."""
    outputs = float(kernel.m) * kernel.n * kernel.groups
    inputs = kernel.nbytes - outputs
    return float(kernel.m) * kernel.k * kernel.groups / inputs if inputs > 0 else 0.0
