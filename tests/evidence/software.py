"""What the software of a measured step does, as ``data/software.toml`` beside it says it.

A framework, its version and a published recipe are inputs of a run, as a GPU is. Each differs in a few things that can
be read in its code: which kernels it fuses, which memory format its convolutions have, what stays fp32 under mixed
precision, which attention it runs, what its pipeline and its data-parallel ranks overlap.

Three numbers are identified on V100 BERT-base steps of one GPU (Oneflow-Inc/DLPerf): ``passes`` of TensorFlow 1 and of
PaddlePaddle in fp32, within 3 %, after which their mixed precision is still 15-18 % too fast; and of XLA (9 % in half
precision, 12 % in fp32, BERT-large included). All else is read from the code and met without a number: fused and
channels-last ResNets within 6 %. Rows of 16 and more GPUs are 10 % too fast in most frameworks, and half of what was
measured for PaddlePaddle, whose steps double from one GPU to eight.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import inf
from pathlib import Path

import msgspec

from clustersim.core.texts import Table
from clustersim.model.seconds import CONSTANTS, ComputeConstants

DATA = Path(__file__).parent / "data"
Row = Mapping[str, str]


class Framework(msgspec.Struct, frozen=True):
    """How a framework runs a data-parallel step.

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

    def constants(self) -> ComputeConstants:
        """The compute model's constants with elementwise traffic as this framework moves it."""
        wide = CONSTANTS.memory_fp32 / 2
        half = CONSTANTS.memory_half if self.half_elementwise else wide
        return replace(
            CONSTANTS,
            memory_half=half / self.passes,
            half_gain=CONSTANTS.half_gain if self.half_elementwise else 1.0,
            memory_fp32=CONSTANTS.memory_fp32 / self.passes,
            memory_compiled=CONSTANTS.memory_compiled / self.passes,
        )


class ShardedTraining(msgspec.Struct, frozen=True):
    """How a code base trains with FSDP or ZeRO.

    Parameters
    ----------
    name : for people. words : pattern that names it in a row's ``source``, ``strategy`` and ``other``, in lower case.
    knobs : of ``[strategy]``. attention : kernel, None for PyTorch's choice. optimizer_impl : of Adam.
    alternate : its plain "selective" checkpointing repeats every second block, not every second product.
    early_stop : recomputation ends with what backward needs: PyTorch 2.1 or later, and not reentrant.
    vocab : of the tokenizer, where a row's is not told; 0 for what the model's name says. memory : which figure its
        rows state, ``allocated`` or ``reserved``.
    """

    name: str
    words: str
    knobs: Table = {}
    attention: str | None = None
    optimizer_impl: str = "foreach"
    alternate: bool = False
    early_stop: bool = False
    vocab: int = 0
    memory: str = "allocated"


class SplitStack(msgspec.Struct, frozen=True):
    """What a stack that splits models does by default, in the words of a scenario.

    Parameters
    ----------
    name : for people. words : pattern of the row's ``framework``, ``version``, ``date`` and ``other``, in lower case.
    framework : whose defaults ``[parallel]`` takes (:func:`clustersim.training.parallel.preset`).
    attention, implementation : of ``[model]``. source : where the defaults can be read.
    zero : of ``[strategy]``, where gradients or parameters are shared out (ZeRO-2 and 3).
    parallel : more of ``[parallel]``. tensor : still more, of dense models with tp > 1. ep_overlap : still more, where
        experts' communication is overlapped.
    dropout : whether GPT and BERT launch dropout kernels.
    fused_scores_and_loss : the dropout of attention scores is in their softmax's kernel, and the loss is one kernel.
    vocab : of the tokenizer, where a row's is assumed; 0 leaves the row's. tied : GPT's head is its embedding.
    pads_vocab : the vocabulary is padded to a multiple of this times tp (``--make-vocab-size-divisible-by``).
    cuts_experts : where a row does not say ``etp``, experts are cut as all else is, and not whole.
    """

    name: str
    words: str
    framework: str
    attention: str
    implementation: str
    source: str
    dropout: bool = True
    fused_scores_and_loss: bool = False
    vocab: int = 0
    tied: bool = True
    pads_vocab: int = 128
    cuts_experts: bool = False
    zero: Table = {}
    parallel: Table = {}
    tensor: Table = {}
    ep_overlap: Table = {}


class PublishedRecipe(msgspec.Struct, frozen=True):
    """What the published recipe of a split model sets, where its row names it and not the setting.

    NVIDIA's performance tables say model, GPU, degrees and release; layout, dispatcher and what is recomputed stand in
    the scripts of that release. What a row itself says goes before it.

    Parameters
    ----------
    words : pattern of a row's ``model framework version gpu precision_recipe``, in lower case. source : where it can be
        read. parallel : of ``[parallel]``. graphs : ``cuda_graph`` of ``[run]``. ep_overlap : as the column.
    layouts : its ``layout`` by the number of chunks of the whole pipeline, for a model of
        ``layers``. mtp : blocks that predict further tokens.
    columns : of a row, what the model's own configuration says where the row has nothing or something else.
    """

    words: str
    source: str
    parallel: Table = {}
    graphs: tuple[str, ...] = ()
    ep_overlap: bool = False
    layouts: dict[int, str] = {}
    layers: int = 0
    mtp: int = 0
    columns: dict[str, str] = {}

    def of(self, chunks: int, layers: int) -> Table:
        """The fields of ``[parallel]`` it sets in a pipeline of so many chunks, for a model of so many layers."""
        laid = layers == self.layers and chunks in self.layouts
        return {**self.parallel, **({"layout": self.layouts[chunks]} if laid else {})}


class Software(msgspec.Struct, frozen=True):
    """The whole file: of each list, the first whose words a row holds is the row's."""

    framework: tuple[Framework, ...]
    sharded: tuple[ShardedTraining, ...]
    stack: tuple[SplitStack, ...]
    recipe: tuple[PublishedRecipe, ...]


@lru_cache(maxsize=1)
def software() -> Software:
    """All that is known."""
    return msgspec.convert(tomllib.loads((DATA / "software.toml").read_text("utf-8")), Software, str_keys=True)


def _lower(row: Row, *columns: str) -> str:
    return " ".join(row.get(column, "") for column in columns).lower()


PYTORCH = Framework("PyTorch", r"")
"""What a row is taken for that names nothing else."""


def framework(row: Row) -> Framework:
    """The framework a row names, PyTorch if none."""
    text = _lower(row, "source", "other", "model").replace("without xla", "")
    return next((one for one in software().framework if re.search(one.words, text)), PYTORCH)


def sharded(text: str) -> ShardedTraining:
    """The code base of an FSDP or ZeRO row of this text."""
    return next(one for one in software().sharded if re.search(one.words, text))


def stack_of(row: Row) -> SplitStack:
    """The stack a row names. Raises ValueError for one that is not known."""
    named = _lower(row, "framework", "version", "date", "other")
    found = next((one for one in software().stack if re.search(one.words, named)), None)
    if found is None:
        known = ", ".join(one.name for one in software().stack)
        raise ValueError(f"framework {row.get('framework', '')!r} is not known; known: {known}")
    return found


def recipe_of(row: Row) -> PublishedRecipe:
    """The recipe a row names; one that sets nothing where it names none that is known."""
    named = _lower(row, "model", "framework", "version", "gpu", "precision_recipe")
    return next((one for one in software().recipe if re.search(one.words, named)), PublishedRecipe("", ""))
