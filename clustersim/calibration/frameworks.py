"""What the software of a measured step does differently from PyTorch run op by op.

A framework or library version is an input of a run, as a GPU is. Each differs in a few things that can be read in its
code: which kernels it fuses, which memory format its convolutions have, what stays fp32 under mixed precision, how many
passes its norms, activations and dropouts take. One row a framework; nothing here belongs to a model, a GPU or a case.

Three numbers are identified on V100 BERT-base steps of one GPU (Oneflow-Inc/DLPerf): ``passes`` of TensorFlow 1 and of
PaddlePaddle in fp32, within 3 %, after which their mixed precision is still 15-18 % too fast; and of XLA (9 % in half
precision, 12 % in fp32, BERT-large included). All else is read from the code and met without a number: fused and
channels-last ResNets within 6 %. Rows of 16 and more GPUs are 10 % too fast in most frameworks, and half of what was
measured for PaddlePaddle, whose steps double from one GPU to eight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from clustersim.compute import CONSTANTS, Constants


@dataclass(frozen=True)
class Framework:
    """How a framework runs a step.

    Parameters
    ----------
    name : for people. words : pattern that names it in a row's ``source``, ``other`` and ``model``, in lower case.
    half_parameters : mixed precision keeps a 16-bit model with fp32 master weights in the optimizer (Apex O2, MXNet);
        otherwise weights are fp32 and cast in every pass (autocast).
    half_elementwise : mixed precision runs activations, dropout and sums in 16 bits. TensorFlow 1's graph rewrite and
        Paddle's keep all but matrix products and convolutions in fp32.
    passes : bytes a transformer's elementwise ops move, over those of PyTorch's kernels. TensorFlow 1 builds LayerNorm,
        GELU and dropout from a dozen ops each.
    implementation : of the models' op lists; "fused" has one kernel for BatchNorm, ReLU and the residual sum, and for
        bias, activation and dropout. compiled : elementwise kernels are generated (XLA).
    channels_last : 16-bit convolutions run in NHWC, without transposes around them.
    gathers_masked : BERT's pretraining head sees only the masked tokens.
    bucket_cap_mb : [MiB] of gradients reduced together; None for DDP's default, infinity for one flat all_reduce after
        backward. Horovod's fusion buffer holds 64 MiB (HOROVOD_FUSION_THRESHOLD).
    flat_rate : [bytes/s] at which gradients reduced in one call are made one tensor and taken apart again, in memory
        that a full card must free first (cudaFree and cudaMalloc every step).
    """

    name: str
    words: str
    half_parameters: bool = False
    half_elementwise: bool = True
    passes: float = 1.0
    channels_last: bool = False
    implementation: str | None = None
    compiled: bool = False
    gathers_masked: bool = True
    bucket_cap_mb: float | None = None
    flat_rate: float = inf

    def constants(self) -> Constants:
        """The compute model's constants with elementwise traffic as this framework moves it."""
        half = CONSTANTS.memory_half if self.half_elementwise else CONSTANTS.memory_fp32 / 2
        return replace(
            CONSTANTS, memory_half=half / self.passes, memory_fp32=CONSTANTS.memory_fp32 / self.passes,
            memory_compiled=CONSTANTS.memory_compiled / self.passes,
        )  # fmt: skip


PYTORCH = Framework("PyTorch", r"")
"""What a row is taken for that names nothing else."""

_HOROVOD = 64.0
_MXNET = Framework("MXNet", r"mxnet", half_parameters=True, bucket_cap_mb=_HOROVOD)
_TENSORFLOW = Framework(
    "TensorFlow",
    r"tensorflow|\btf[12]\b",
    half_elementwise=False,
    passes=3.5,
    channels_last=True,
    bucket_cap_mb=_HOROVOD,
)
_APEX = Framework(
    "PyTorch with Apex",
    r"\bapex\b|framework ngc pytorch",
    half_parameters=True,
    gathers_masked=False,
    bucket_cap_mb=inf,
)

FRAMEWORKS = (
    Framework("OneFlow", r"framework (2 )?oneflow", channels_last=True, implementation="fused"),
    replace(
        _MXNET, name="NGC MXNet", words=r"ngc mxnet|mxnet/classification", channels_last=True, implementation="fused"
    ),
    _MXNET,
    Framework("PaddlePaddle", r"paddlepaddle", half_elementwise=False, passes=1.8),
    Framework(
        "TensorFlow with XLA",
        r"\bxla\b|deeplearningexamples tensorflow2?/language",
        channels_last=True,
        compiled=True,
        passes=1.4,
        bucket_cap_mb=_HOROVOD,
    ),
    _TENSORFLOW,
    # Its SSD has been channels last since November 2021, when its tables were measured anew.
    replace(
        _APEX,
        name="PyTorch, channels last",
        words=r"deeplearningexamples pytorch/(classification|detection/ssd)",
        channels_last=True,
    ),
    # NVIDIA's Transformer-XL script wraps its Apex model in torch's own DDP.
    replace(_APEX, name="PyTorch with Apex and torch's DDP", words=r"\bapex\b.*transformer-?xl", bucket_cap_mb=None),
    # Lambda's benchmark takes the largest batch that fits. What its second GPU adds is 2 to 4 GB/s of gradients on
    # A100 and 5 to 8 on V100, in BERT, GNMT, WaveGlow and SSD alike; four add no more, so it is no ring's time. 7 GB/s
    # meets BERT best; GNMT, SSD and ResNet-50, left out, are nearer with it too (43 to 31, 5.6 to 5.4, 4.0 to 3.0 %).
    replace(_APEX, name="PyTorch with Apex on a full card", words=r"lambdal/deeplearning-benchmark", flat_rate=7e9),
    _APEX,
)
"""Named frameworks; the first whose words a row holds is it."""


def framework(row: Mapping[str, str]) -> Framework:
    """The framework a row names, PyTorch if none."""
    text = " ".join(row.get(column, "") for column in ("source", "other", "model")).lower().replace("without xla", "")
    return next((f for f in FRAMEWORKS if re.search(f.words, text)), PYTORCH)
