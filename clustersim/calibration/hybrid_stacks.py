"""What the software of a measured hybrid-parallel step does where its row says nothing.

One row a stack, chosen by the row's ``framework`` column: which kernels it fuses, which attention it runs, what its
pipeline and its data-parallel ranks overlap. Every entry is the framework's own default or what its published
benchmark script sets, with the place where it can be read; nothing here belongs to a GPU, a model or a case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from clustersim.calibration.step_rows import Row
from clustersim.texts import Table


@dataclass(frozen=True)
class Stack:
    """A training stack's defaults, in the words of a scenario.

    Parameters
    ----------
    name : for people. words : pattern of the row's ``framework``, ``date`` and ``other``, in lower case.
    framework : whose defaults ``[parallel]`` takes (:func:`clustersim.parallel.preset`).
    attention, implementation : of ``[model]``. optimizer_impl : of ``[run]``.
    parallel : more of ``[parallel]``. tensor : still more, of dense models with tp > 1.
    dropout : whether GPT and BERT launch dropout kernels.
    fused_scores_and_loss : the dropout of attention scores is in their softmax's kernel, and the loss is one kernel.
    vocab : of the tokenizer, where a row's is assumed; 0 leaves the row's. tied : GPT's head is its embedding.
    pads_vocab : the vocabulary is padded to a multiple of this times tp (``--make-vocab-size-divisible-by``).
    source : where the defaults can be read.
    """

    name: str
    words: str
    framework: str
    attention: str
    implementation: str
    source: str
    optimizer_impl: str = "fused"
    dropout: bool = True
    fused_scores_and_loss: bool = False
    vocab: int = 0
    tied: bool = True
    pads_vocab: int = 128
    parallel: Table = field(default_factory=dict)
    tensor: Table = field(default_factory=dict)


_SCATTERED = {"pipeline_partitioned": True}
"""scatter_gather_tensors_in_pipeline (Megatron-LM v2.5 megatron/p2p_communication.py; arXiv 2104.04473 s4.1): each
tensor-parallel rank sends its share of a message, which its receivers gather. An option before v2.5, then the rule."""
_IN_2021 = {"gradient_accumulation_fusion": False, "tp_grad_overlap": False}
_OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "dispatcher": "alltoall"}
_RECIPES = {**_OVERLAPPED, "grad_reduce_in_fp32": False}

STACKS = (
    Stack(
        "Megatron-LM, zero-bubble fork", r"zero-bubble", "megatron", "eager", "megatron",
        "sail-sg/zero-bubble-pipeline-parallelism examples/pretrain_{zbh1,zero_bubble}.sh, README.md: fused kernels of "
        "Megatron-LM 2023, plain DDP of one replica; untied embeddings of a SentencePiece vocabulary, which the "
        "paper's 14.6B and 28.3B say has 32,000 words; no overlap of p2p in 1F1B; the zero-bubble schedules validate "
        "the optimizer's step afterwards",
        vocab=32000, tied=False, parallel={"overlap_p2p_communication": False},
    ),
    Stack(
        "Megatron-DeepSpeed since 2023", r"megatron-deepspeed.* 202[3-9]", "deepspeed", "eager", "megatron",
        "microsoft/Megatron-DeepSpeed, rebased on Megatron-LM v3: the same kernels, backward's all_reduce "
        "beside the weight "
        "gradient",
        parallel={"partition_method": "uniform"},
    ),
    Stack(
        "Megatron-DeepSpeed", r"megatron-deepspeed", "deepspeed", "eager", "megatron",
        "bigscience-workshop/Megatron-DeepSpeed megatron/arguments.py: masked_softmax_fusion, bias_gelu_fusion and "
        "bias_dropout_fusion on, no flash attention; DeepSpeed's PipelineModule; of mid-2021, before Megatron-LM's "
        "asynchronous all_reduce in backward",
        parallel={"partition_method": "uniform", "tp_grad_overlap": False},
    ),
    Stack(
        "NeMo of early 2024", r"^nemo.* 2024", "megatron", "fa2", "fused",
        "NeMo 24.03 with Transformer Engine 1.4: context parallelism ran on flash-attn 2 alone; else as NeMo since",
        dropout=False, parallel=_OVERLAPPED,
    ),
    Stack(
        "performance recipes of NeMo and Megatron-Bridge", r"megatron-bridge|^nemo", "megatron", "cudnn", "fused",
        "NVIDIA/NeMo nemo/collections/llm/recipes/llama3_70b.py, NVIDIA-NeMo/Megatron-Bridge scripts/performance: as "
        "Megatron-Core; dense recipes of tp > 1 have sequence_parallel and tp_comm_overlap with user buffers "
        "(userbuffers_{bf16,fp8}_h100_h8192_tp4_mbs1_seqlen8192, ..._h16384_tp8_cp2_...); all of Bridge's set "
        "grad_reduce_in_fp32 to False",
        dropout=False, parallel=_RECIPES, tensor={"sequence_parallel": True, "tp_overlap": "userbuffers"},
    ),
    Stack(
        "Megatron-Core with Transformer Engine", r"megatron-lm 0\.1|megatron-core", "megatron",
        "cudnn", "fused",
        "Transformer Engine's fused attention, norms, RoPE and SwiGLU; benchmarks "
        "set overlap_grad_reduce, overlap_param_gather and the alltoall dispatcher",
        dropout=False, parallel=_OVERLAPPED,
    ),
    Stack(
        "Megatron-LM of SC21", r"megatron-lm.* 2021-04", "megatron", "eager", "megatron",
        "Megatron-LM examples/sc21: as Megatron-LM of 2021, with messages scattered and gathered",
        parallel=_IN_2021, tensor=_SCATTERED,
    ),
    Stack(
        "Megatron-LM of 2021", r"megatron-lm.* 2021", "megatron", "eager", "megatron",
        "Megatron-LM v2.5 megatron/arguments.py: masked_softmax_fusion, bias_gelu_fusion and "
        "bias_dropout_fusion on; local "
        "DDP, which reduces after backward; gradients are added by a pass of their own; apex FusedAdam",
        parallel=_IN_2021,
    ),
    Stack(
        "Megatron-LM of 2022", r"megatron-lm", "megatron", "eager", "megatron",
        "Megatron-LM v3.0 megatron/arguments.py: as before, backward's all_reduce beside the weight gradient; fp16 "
        "gradients are added by a pass of their own",
        parallel={"gradient_accumulation_fusion": False}, tensor=_SCATTERED,
    ),
    Stack(
        "OneFlow", r"libai|oneflow", "oneflow", "eager", "megatron",
        "Oneflow-Inc/libai libai/models/utils/graph_base.py and OneFlow-Benchmark LanguageModeling/GPT "
        "oneflow_gpt/training.py: NCCL on the compute stream wherever the model is split; fused bias, GELU, dropout, "
        "scale-mask-softmax kernels",
        fused_scores_and_loss=True,
    ),
    Stack(
        "torchtitan, compiled", r"torchtitan.* torch\.compile", "torchtitan", "fa2", "fused",
        "torchtitan/config/configs.py; train_configs/llama3_*.toml: FSDP2 a block, scaled_dot_product_attention",
        dropout=False, pads_vocab=0,
    ),
    Stack(
        "torchtitan", r"torchtitan", "torchtitan", "fa2", "flash", "the same without torch.compile: op by op",
        dropout=False, pads_vocab=0,
    ),
)  # fmt: skip
"""Known stacks; the first whose words a row's framework holds is it."""


def stack_of(row: Row) -> Stack:
    """The stack a row names. Raises ValueError for one that is not known."""
    named = " ".join(row.get(column, "") for column in ("framework", "date", "other")).lower()
    for stack in STACKS:
        if re.search(stack.words, named):
            return stack
    raise ValueError(f"framework {row.get('framework', '')!r} is not known; known: {', '.join(s.name for s in STACKS)}")
