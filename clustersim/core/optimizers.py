"""Optimizers: what one keeps of a parameter, what a step of it moves, and which strategies it can be used with."""

from __future__ import annotations

import msgspec

from clustersim.core.model import Model
from clustersim.core.row_table import RowTable

ALL = ("single", "ddp", "fsdp", "zero")
"""Strategies whose ranks update whole tensors or plain shards of them."""
BLOCK = 256
"""Elements that share a scale in 8 bits (bitsandbytes ``optimizer_update_8bit_blockwise``)."""
LEAST_PACKED = 4096
"""Elements from which a tensor's states are in 8 bits (bitsandbytes ``min_8bit_size``)."""
FULL_STATES = 8.0
"""Bytes of two fp32 states."""


class OptimizerRow(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer.

    Parameters
    ----------
    name : as ``run.optimizer``. passes : tensors of the parameters' size and type that a step reads or writes, in one
        fused kernel and in a chain of foreach kernels. ops : kernels of that chain. states : tensors of the parameters'
        size and type that it keeps.
    kept : bytes an element of states that have a type of their own. each_tensor : its kernels take one tensor each.
    paged : its states are in memory that moves to the host where a GPU's is full. factored : of a matrix it keeps a
        number a row and one a column, in fp32. orthogonal : iterations of Newton and Schulz on each matrix of a block;
        the other tensors are AdamW's.
    kinds : strategies that it is used with where it is not plain; with all where empty.
    """

    name: str
    passes: tuple[int, int]
    ops: int
    states: int = 0
    kept: float = 0.0
    each_tensor: bool = False
    paged: bool = False
    factored: bool = False
    orthogonal: int = 0
    kinds: tuple[str, ...] = ()

    @property
    def two_states(self) -> bool:
        """Whether a foreach step holds a list of denominators of the parameters' size."""
        return self.states == 2

    def element_traffic(self, implementation: str, element: float) -> float:
        """Bytes that a step reads and writes of an element kept in so many bytes."""
        passes = self.passes[0 if implementation == "fused" or self.each_tensor else 1]
        return passes * element + 2.0 * self.kept


# Adam fused reads and writes parameter, first and second moment, and reads the gradient (7); its foreach chain is lerp,
# mul, addcmul, sqrt, two divisions, add and addcdiv (18), and weight decay on top (torch/optim/{sgd,adam,adamw}.py).
# Lion's is a decay, a mix, a sign, a sum and the momentum's own mix, tensor by tensor (llm-foundry optim/lion.py).
# bitsandbytes' kernel reads gradient and parameter and writes the parameter, beside its states. Adafactor squares the
# gradient, takes two means of it, and scales it by their product and its own mean square (torch/optim/_adafactor.py).
# Muon updates the momentum, mixes it with the gradient, casts it, and adds what the iterations make of it
# (torch/optim/_muon.py).
# TorchAO's in 4 bits packs two elements in a byte, with a scale for 128 of them (torchao/optim/subclass_4bit.py).
_EIGHT_BITS = 2.0 * (1.0 + 4.0 / BLOCK)
_FOUR_BITS = 2.0 * (0.5 + 4.0 / 128)
ROWS = (
    OptimizerRow(name="sgd", passes=(3, 3), ops=1),
    OptimizerRow(name="sgd_momentum", passes=(5, 11), ops=4, states=1),
    OptimizerRow(name="adam", passes=(7, 18), ops=9, states=2),
    OptimizerRow(name="adamw", passes=(7, 20), ops=10, states=2),
    OptimizerRow(name="lion", passes=(13, 13), ops=5, states=1, each_tensor=True),
    OptimizerRow(name="lamb", passes=(12, 26), ops=14, states=2),
    OptimizerRow(name="adamw_8bit", passes=(3, 3), ops=1, kept=_EIGHT_BITS, each_tensor=True, kinds=ALL),
    OptimizerRow(name="adamw_4bit", passes=(3, 3), ops=1, kept=_FOUR_BITS, each_tensor=True, kinds=ALL),
    OptimizerRow(name="paged_adamw", passes=(3, 3), ops=1, kept=FULL_STATES, each_tensor=True, paged=True, kinds=ALL),
    OptimizerRow(
        name="paged_adamw_8bit", passes=(3, 3), ops=1, kept=_EIGHT_BITS, each_tensor=True, paged=True, kinds=ALL
    ),
    OptimizerRow(name="adafactor", passes=(18, 18), ops=16, each_tensor=True, factored=True, kinds=("single", "ddp")),
    OptimizerRow(
        name="muon", passes=(13, 13), ops=7, states=1, each_tensor=True, orthogonal=5, kinds=("single", "ddp", "fsdp")
    ),
)
OPTIMIZERS = RowTable("clustersim.optimizers", "optimizer", OptimizerRow, ROWS)
"""Every optimizer by name."""


def matrices(model: Model) -> dict[tuple[int, int], int]:
    """(rows, columns) of the matrices in blocks that are trained, and how many there are of each: what Muon takes."""
    counts: dict[tuple[int, int], int] = {}
    for layer in model.layers:
        for tensor in layer.tensors if layer.kind == "block" else ():
            if tensor.rows > 1 and tensor.width > 1 and not tensor.frozen and not tensor.tied_to:
                size = tensor.rows, tensor.width
                counts[size] = counts.get(size, 0) + 1
    return counts


def state_bytes(model: Model, name: str | None, element: float) -> float:
    """Bytes of an optimizer's states of all that is trained of a model, whose elements it keeps in ``element`` bytes.

    >>> from clustersim.core.model import Layer, Tensor
    >>> one = Model("one", "mlp", (Layer("fc", "block", (Tensor("w", 8192, width=64), Tensor("b", 128)), ()),))
    >>> [state_bytes(one, name, 4.0) for name in ("adamw", "adamw_8bit", "adafactor", "muon")]
    [66560.0, 17664.0, 1280.0, 33792.0]
    """
    if name is None:
        return 0.0
    row = OPTIMIZERS[name]
    if row.factored or row.kept:
        own = [t for layer in model.layers for t in layer.tensors if not t.frozen and not t.tied_to]
        if row.factored:
            return float(sum(4 * (t.rows + t.width if t.rows > 1 and t.width > 1 else t.numel) for t in own))
        return float(sum(t.numel * (row.kept if t.numel >= LEAST_PACKED else FULL_STATES) for t in own))
    if row.orthogonal:
        of_blocks = sum(rows * columns * count for (rows, columns), count in matrices(model).items())
        return float(element * (2 * model.trained - of_blocks))
    return float(element * row.states * model.trained)


def workspace_bytes(model: Model, name: str | None, element: float) -> float:
    """Bytes that a step holds beside its states for the largest tensor: of Muon the momentum in 16 bits, its product
    with itself, what that comes to, and the next iterate; of Adafactor the gradient and the update in fp32, and 16-bit
    ones cast."""
    row = OPTIMIZERS[name] if name is not None else None
    if row is not None and row.orthogonal:
        sizes = [(min(size), max(size)) for size in matrices(model)]
        return max((2.0 * (2 * small * large + 2 * small * small) for small, large in sizes), default=0.0)
    if row is not None and row.factored:
        largest = max(t.numel for layer in model.layers for t in layer.tensors if not t.frozen)
        return largest * (8.0 if element >= 4 else 16.0)
    return 0.0
