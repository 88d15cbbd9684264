"""The TOML schema of a scenario: what a file may say, with defaults. Knob names are the frameworks' own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from clustersim.core.texts import Table
from clustersim.core.units import Bandwidth, Bytes, CopyRate, Seconds
from clustersim.core.variation import Variation
from clustersim.engine.hang import Watchdogs
from clustersim.model.adapter_setting import Adapter
from clustersim.model.packing import Packing
from clustersim.scenario.file.campaign_schema import CampaignTable
from clustersim.scenario.file.incident_table import Incident
from clustersim.training.parallel import ParallelConfig
from clustersim.training.strategies.base import StrategyConfig

Positive = Annotated[int, Meta(ge=1, le=10_000_000)]
"""Of anything that is counted; more of it exists nowhere."""


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[[cluster.changes]]``: something degraded or gone in this run.

    Parameters
    ----------
    match : a vertex (``"node3/nic0"``: all its links) or links (``"node0/gpu0 -> node0/nvswitch*"``); globs.
    factor : its bandwidth is multiplied by it; below 1 NCCL does not see that, and plans with the full rate.
    bandwidth : its new line rate, with a unit, which NCCL reads and searches with. remove : it is gone.
    from : since when, such as ``"2 s"`` of the run; from its beginning when absent. until : the end of it; the run's
        when absent. every : it comes back so long after it began, at least 1 us, again and again: a link that flaps.
        With one of these a factor of at most 1 is needed (0.001 for a link that is down), and collectives are planned
        as if it were not.
    """

    match: str
    factor: Annotated[float, Meta(ge=1e-6, le=1e6)] | None = None
    bandwidth: Bandwidth | None = None
    remove: bool = False
    since: Seconds | None = msgspec.field(name="from", default=None)
    until: Seconds | None = None
    every: Seconds | None = None

    def __post_init__(self) -> None:
        if not self.timed:
            return
        if self.factor is None or self.factor > 1:
            raise ValueError("from, until and every need a factor of at most 1: 0.1, or 0.001 for a link that is down")
        begin = self.since or 0.0
        end = self.until
        if end is not None and end <= begin:
            raise ValueError("until must be later than from")
        if self.every is not None and (end is None or self.every <= end - begin):
            raise ValueError("every needs an until, and to be longer than from from to until")
        if self.every is not None and self.every < 1e-6:
            raise ValueError("every must be at least 1 us")

    @property
    def timed(self) -> bool:
        """Whether it is for a part of the run only."""
        return (self.since, self.until, self.every) != (None, None, None)


class Slow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[[cluster.slow]]``: GPUs slower than the others (throttled, power-capped).

    Parameters
    ----------
    ranks : who drives them. speed : of their usual pace; 0.8 makes kernels take 1.25 times as long.
    """

    ranks: tuple[int, ...]
    speed: Annotated[float, Meta(ge=1e-3, le=1e3)]


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[cluster]``: the machine.

    Parameters
    ----------
    topology : a shipped name (``clustersim check`` lists them), or the path of a file, relative to the scenario.
    nodes : how many machines; 1, or what a file that lists its own nodes says. gpus_per_node : ranks on each; all of
        its GPUs when absent.
    device : another GPU in the same sockets, such as ``"A100-SXM4-40GB"``.
    fabric : fields of the topology's ``[fabric]`` to change, such as ``oversubscription``; with ``kind``, a whole one.
    changes : parts degraded or gone. slow : GPUs slower than the others.
    measured : a few timed collectives of this machine, as in a topology's ``[measured]``:
        ``all_reduce = [{nodes = 2, size = "8 B", time = "38 us"}]``.
    """

    topology: str
    nodes: Positive | None = None
    gpus_per_node: Positive | None = None
    device: str | None = None
    fabric: Table = {}
    changes: tuple[Change, ...] = ()
    slow: tuple[Slow, ...] = ()
    measured: Table = {}


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[model]``: what is trained. One of ``hf_config``, ``file`` and ``name``.

    Parameters
    ----------
    hf_config : path of an unchanged Hugging Face ``config.json`` (or its folder), relative to the scenario.
    file : path of a model file that ``clustersim trace-model`` wrote. It says itself how long a sample is and which
        kernels run; ``dtype``, ``activation_checkpointing`` and the kernel of fused attention are said here.
    name : a model clustersim knows.
    seq_len : tokens per sample; the config's own maximum when absent.
    dtype : of the GEMMs; fp16 and bf16 mean autocast over fp32 parameters, as ``torch.autocast``.
    attention : ``eager`` (scores written to memory), ``flash`` (fused, by the kernel PyTorch would pick), or a kernel
        of this name: ``efficient``, ``fa1``, ``triton``, ``fa2``, ``fa3``, ``fa4``, ``cudnn``,
        ``aotriton`` (PyTorch's on ROCm).
    implementation : ``eager`` (op by op), ``flash`` (with fused attention and GELU), ``liger`` (with Liger's norms,
        rotation and gated activations) or ``fused`` (torch.compile).
    channels_last : convolutions in 16 bits read and write channels last, as tensor cores want them, and nothing is
        transposed around them (``model.to(memory_format=torch.channels_last)``); ``implementation = "fused"`` does so
        by itself.
    activation_checkpointing : ``none``; ``full``: only block inputs are kept and backward recomputes the rest;
        ``selective``: all but attention and every second matrix product is recomputed.
    early_stop : of ``full``, recomputation ends with the last tensor that backward needs, so that a block's last
        product is not repeated (``torch.utils.checkpoint``'s, since PyTorch 2.1 and with ``use_reentrant=False``); with
        FSDP, whose wrapper does so, and compiled code when absent.
    float8_recipe : of ``dtype = "fp8"``, one scale a tensor (torchao's ``tensorwise``, Transformer Engine's delayed and
        current scaling), a row (torchao's ``rowwise``; ``rowwise_with_gw_hp`` leaves weight gradients in bf16) or a
        block (Transformer Engine's ``blockwise`` and ``mxfp8``, and ``nvfp4``, whose products are in 4 bits).
    frozen : parameters that are not trained: patterns of their names or of their modules'
        (``["model.embed_tokens", "model.layers.[0-7].*"]``).
    loss : ``liger`` (logits and their gradients chunk by chunk of the tokens), ``chunked`` (torchtitan's: an eighth of
        the tokens after another, forward and backward) or ``cut`` (Cut Cross-Entropy: logits in registers, twice),
        where the head never has all logits; else they are written, as ``implementation`` says.
    activation_offloading : what layers keep for backward goes to the host beside the passes (torchtune's and TRL's
        ``activation_offloading``): ``true``, at what copies reach of the machine's own links, all GPUs at once; or at
        this rate of a GPU in each direction, such as ``"20 GB/s"``.
    packing : of which documents a sample is packed.
    adapter : low-rank adapters that are trained in place of the model's own parameters.
    options : anything else about the model's shape, such as ``layers = 2`` or BERT's ``head = "mlm"``.
    """

    hf_config: str | None = None
    file: str | None = None
    name: str | None = None
    seq_len: Positive | None = None
    dtype: Literal["fp32", "tf32", "fp16", "bf16", "fp8"] = "fp32"
    attention: (
        Literal["eager", "flash", "efficient", "fa1", "triton", "fa2", "fa3", "fa4", "cudnn", "aotriton"] | None
    ) = None
    implementation: Literal["eager", "flash", "liger", "megatron", "fused"] | None = None
    channels_last: bool = False
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    early_stop: bool | None = None
    float8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4"] = "tensorwise"
    frozen: tuple[str, ...] = ()
    adapter: Adapter | None = None
    loss: Literal["liger", "chunked", "cut"] | None = None
    activation_offloading: CopyRate | None = None
    packing: Packing | None = None
    options: Table = {}

    def __post_init__(self) -> None:
        if self.frozen and self.adapter is not None:
            raise ValueError("frozen is for a model without [model.adapter], which freezes all but modules_to_save")
        if self.adapter is not None and self.dtype == "fp8":
            raise ValueError('dtype = "fp8" beside [model.adapter] is not played; use "bf16"')
        if [self.hf_config, self.file, self.name].count(None) != 2:
            raise ValueError("write one of hf_config, file and name")
        if self.file is not None:
            self._check_traced()
        if self.float8_recipe != "tensorwise" and self.dtype != "fp8":
            raise ValueError(f'float8_recipe = "{self.float8_recipe}" needs dtype = "fp8"')

    def _check_traced(self) -> None:
        """Raise ValueError for what a traced model has already."""
        if self.implementation is not None:
            raise ValueError(
                f'implementation = "{self.implementation}": a traced model runs the kernels of its file, op by op; '
                "leave it out"
            )
        if self.attention == "eager":
            raise ValueError('attention = "eager": a traced model runs the attention that was traced; leave it out')
        if self.frozen or self.adapter is not None:
            raise ValueError(
                "frozen and adapter are not played with a traced model, whose backward is as it was traced"
            )
        if self.options:
            raise ValueError(
                f"options = {self.options}: a traced model is what was traced; trace it again to change it"
            )


WHOLE_STEP = "full_iteration"
"""Of ``cuda_graph``: a graph of the whole step, which no host calls."""
GraphScope = Literal["full_iteration", "attn", "mamba", "mlp", "moe", "moe_router", "moe_preprocess"]


CollectiveKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
"""Kinds that NCCL chooses an algorithm for."""


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[[run.pins]]``: what NCCL is known to choose; ``clustersim trace nccl.log --pins`` writes them.

    Parameters
    ----------
    kind : ``"all_reduce"``, ``"all_gather"`` or another that NCCL chooses for. algorithm, protocol : as NCCL_ALGO and
        NCCL_PROTO. least, most : sizes of the full tensor, both included. ranks : of groups of so many; all if absent.
    """

    kind: CollectiveKind
    algorithm: str
    protocol: str | None = None
    least: Bytes | None = None
    most: Bytes | None = None
    ranks: Positive | None = None

    def __post_init__(self) -> None:
        if self.least is not None and self.most is not None and self.most < self.least:
            raise ValueError("most must not be smaller than least")

    def fits(self, kind: str, nbytes: float, ranks: int) -> bool:
        """Whether it is for such a collective."""
        within = (self.least or 0.0) <= nbytes <= (math.inf if self.most is None else self.most)
        return self.kind == kind and within and self.ranks in (None, ranks)


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[run]``: how long, how fine, and on what software.

    Parameters
    ----------
    steps : training steps; the first is special for DDP (buckets in registration order), so at least 3 are wise. Of a
        strategy that repeats only every so many steps, more are played: figures are means over its whole periods.
    seed : of whatever varies. jitter : relative standard deviation of a rank's compute; the device's own if absent.
        Short for ``variation = {step_cv = jitter, draws = "usual"}``. variation : how ranks and steps differ, instead.
    fidelity : ``flow`` (a collective is one fluid flow) or ``chunk`` (every ring or tree step an event; slow). Both
        take rates and latency from the backend. Alone on a machine they agree within 0.5 %, at 64 MiB; but where
        streams of a pipeline share links (a ring's broadcast and reduce 7 %, a tree's all_reduce 3 %, broadcast 8 %,
        reduce 1 %), for PAT (13 %), and for reductions up a binary tree (5 %). Smaller pipelines differ by more.
    op_by_op : every micro-batch is written out and every op played by itself, to check what is done once for many: the
        same times, but for the last bits, and several times slower.
    backend : ``nccl``, ``gloo``, ``mpi`` (Open MPI 4.1) or ``ideal`` (the textbook at line rate); absent: NCCL, and
        Gloo between CPUs. opal_cuda_support : of Open MPI (``--mca opal_cuda_support 1``): GPU tensors that are not
        added go from GPU to GPU; without it all are staged through the host.
    optimizer, optimizer_impl : ``sgd``, ``sgd_momentum``, ``adam``, ``adamw``, ``lamb``, bitsandbytes' ``adamw_8bit``,
        ``paged_adamw`` and ``paged_adamw_8bit``, TorchAO's ``adamw_4bit``, ``adafactor``, ``muon`` (AdamW for what is
        no matrix of a block) or ``none``; ``foreach``, ``fused`` or ``for-loop``.
    launch : ``process_per_gpu`` (torchrun), ``single_process`` or ``threads``.
    cuda_graph : what is captured in CUDA graphs, whose modules the host does not call: ``["full_iteration"]``, or parts
        of a split model's layers, as Megatron's ``cuda_graph_scope`` names them.
    nccl_version : ``"2.28"``, in quotes. nccl_environment : NCCL's variables, ``{NCCL_P2P_LEVEL = "SYS"}``: what is
        played of them is played, and what else changes times is told. pins : what NCCL is known to choose, by kind and
        size, which goes before.
    """

    steps: Positive = 3
    seed: Annotated[int, Meta(ge=0)] = 0
    jitter: Annotated[float, Meta(ge=0, le=1)] | None = None
    variation: Variation | None = None
    fidelity: Literal["flow", "chunk"] = "flow"
    op_by_op: bool = False
    backend: Literal["nccl", "gloo", "mpi", "ideal"] | None = None
    opal_cuda_support: bool = False
    optimizer: str = "adam"
    optimizer_impl: Literal["foreach", "fused", "for-loop"] = "foreach"
    launch: Literal["process_per_gpu", "single_process", "threads"] = "process_per_gpu"
    cuda_graph: tuple[GraphScope, ...] = ()
    nccl_version: str = "2.28"
    nccl_environment: dict[str, str] = {}
    pins: tuple[Pin, ...] = ()

    def __post_init__(self) -> None:
        if self.jitter is not None and self.variation is not None:
            raise ValueError("write one of jitter and variation; variation.step_cv is what jitter is short for")
        if self.opal_cuda_support and self.backend != "mpi":
            raise ValueError("opal_cuda_support is Open MPI's; write it with backend = 'mpi'")

    @property
    def tells_nccl(self) -> bool:
        """Whether NCCL does not choose all by itself: pins or variables tell it what."""
        return bool(self.pins or self.nccl_environment)


class MeasuredStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[[measured.steps]]``: a step that somebody timed.

    Parameters
    ----------
    time : seconds of one optimizer step, the median of some. set : in what that run differed from this file as it is
        written, by dotted field: ``{"cluster.nodes" = 1}``. What ``--set`` changes is not of that run.
    """

    time: Seconds
    set: Table = {}

    def __post_init__(self) -> None:
        if not 0 < float(self.time) < math.inf:
            raise ValueError("time must be longer than 0 s")


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[measured]``: what was timed on the real machine, and goes before what is usual.

    Parameters
    ----------
    layer_time : of a layer and micro-batch, what the host takes to call its forward and backward: the step at the
        smallest batch, over micro-batches and layers of a GPU. Recomputation is not in it.
    steps : steps that were timed (:class:`MeasuredStep`): how much longer kernels and calls take than usual follows.
    """

    layer_time: Seconds | None = None
    steps: tuple[MeasuredStep, ...] = ()

    def __post_init__(self) -> None:
        if self.layer_time is not None and not 0 < float(self.layer_time) <= 60:
            raise ValueError("layer_time must be longer than 0 s and at most a minute")


class PublishedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[published]``: what a source has of a run like this one; a run of the file as it is written says how far it is.

    Parameters
    ----------
    source : who says it, and where. step_time, mfu, tokens_per_s_per_gpu : what it says, one or more of them; mfu is a
        share of 1.
    differs : what of that run this file has otherwise.
    """

    source: str
    step_time: Seconds | None = None
    mfu: Annotated[float, Meta(gt=0, lt=1)] | None = None
    tokens_per_s_per_gpu: Annotated[float, Meta(gt=0)] | None = None
    differs: str = ""

    def __post_init__(self) -> None:
        if self.step_time is None and self.mfu is None and self.tokens_per_s_per_gpu is None:
            raise ValueError("write what the source says: step_time, mfu or tokens_per_s_per_gpu")
        if self.step_time is not None and not 0 < float(self.step_time) < math.inf:
            raise ValueError("step_time must be longer than 0 s")


class ScenarioFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole file.

    Parameters
    ----------
    strategy : read a second time by the strategy's own Struct, which ``kind`` names.
    parallel : how the model is split over ranks; without it every rank holds the whole.
    campaign : the whole training that steps like this one are of, for ``clustersim campaign``.
    measured : what was timed on the real machine. published : what a source has of such a run.
    incident : what goes wrong in this run, where and when. watchdog : what ends it where it hangs.
    """

    cluster: Cluster
    model: Model
    strategy: Table
    run: Run = Run()
    parallel: ParallelConfig | None = None
    campaign: CampaignTable | None = None
    measured: Measured | None = None
    published: PublishedStep | None = None
    incident: tuple[Incident, ...] = ()
    watchdog: Watchdogs = Watchdogs()

    READ_LATER: ClassVar[Mapping[str, type]] = {"strategy": StrategyConfig}
    """What tables hold at least that the strategy's own Struct reads."""
