"""What a trace records: operators in the order they ran, and the memory behind their tensors."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Memory:
    """A storage.

    Parameters
    ----------
    nbytes : float. born, died : index of the event that made it, and of the first event that ran without it; None
        where it outlived the step, or was there before.
    kind : ``"weight"`` (parameters and buffers), ``"input"``, ``"gradient"`` (of a parameter), ``"cast"`` (a weight in
        another type) or ``"activation"``.
    keeper : the autograd node that first kept it for backward, by its sequence number; -1 for none.
    weights : parameters that it is made of alone, by name.
    scores : it holds scores of attention, or what was made of them element by element.
    """

    nbytes: float
    born: int | None = None
    died: int | None = None
    kind: str = "activation"
    keeper: int = -1
    weights: frozenset[str] = frozenset()
    scores: bool = False


@dataclass(frozen=True)
class Product:
    """A matrix product: ``batch`` independent ones of (m, k) by (k, n). ``weight`` : which operand is made of weights
    alone, 0 or 1; -1 for neither."""

    batch: int
    m: int
    n: int
    k: int
    weight: int


@dataclass(frozen=True)
class ConvolutionShape:
    """The implicit product of a convolution: ``m`` output positions of all samples, ``n`` channels and ``k`` products
    of each, by group; ``moved`` : elements of its input and output."""

    m: int
    n: int
    k: int
    groups: int
    moved: float


@dataclass(frozen=True)
class AttentionShape:
    """A fused attention: ``heads`` of all samples, elements of one, and tokens of its queries; ``flash`` :
    FlashAttention is written for it, and not PyTorch's memory-efficient kernel alone."""

    heads: int
    kv_heads: int
    head_dim: int
    seq: int
    causal: bool
    flash: bool = True


Shape = Product | ConvolutionShape | AttentionShape


@dataclass
class OpEvent:
    """An operator that ran.

    Parameters
    ----------
    name : ``"add"``. backward : it ran in the backward pass. node : sequence number of the autograd node that it made
        (forward) or that ran it (backward).
    module : path of the innermost module that ran it, ``"layers.0.mlp"``; leaf : that module has no modules inside.
    nbytes, launches, flops : what it costs. shape : of a product, a convolution or a fused attention.
    reads, writes : memories by number. graded : those it read that need a gradient, and their bytes.
    scores : it goes over scores of attention. sums : it adds two tensors of one size. full : a product, a convolution
        or an attention whose operands are in fp32.
    """

    name: str
    backward: bool
    node: int
    module: str
    leaf: bool
    nbytes: float = 0.0
    launches: int = 0
    flops: float = 0.0
    shape: Shape | None = None
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    graded: dict[int, float] = field(default_factory=dict)
    scores: bool = False
    sums: bool = False
    full: bool = False


@dataclass
class ModuleCall:
    """A module that ran: its path, and the events from ``first`` to before ``stop``."""

    path: str
    first: int
    stop: int


@dataclass
class StepTrace:
    """A forward and a backward pass.

    Parameters
    ----------
    events : in order; the forward ones first. turn : index of the first event of backward.
    memories : by number. calls : of modules, in the order they began.
    owners : autograd node -> index of the forward event that made it.
    """

    events: list[OpEvent] = field(default_factory=list)
    turn: int = 0
    memories: list[Memory] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    owners: dict[int, int] = field(default_factory=dict)
