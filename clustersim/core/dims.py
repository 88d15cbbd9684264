"""The named dimensions of parallel training: degrees, and the order in which ranks count through them.

The same ranks are factored twice (Megatron-LM core/parallel_state.py ``RankGenerator``, one for dense layers and one
for experts):

* dense layers: ``world = tp * cp * dp * pp``;
* experts: ``world = etp * ep * edp * pp``, in the same order, with etp in tp's place and edp in dp's.

``dp`` is ``dp_replicate * dp_shard`` (torchtitan's HSDP, and Megatron's optimizer instances: the shard varies faster),
``edp`` is ``dp_replicate * efsdp`` in the same way, and ``cp`` is ``cp_p2p * cp_a2a`` (Megatron's hierarchical context
parallelism: the all-to-all inside, the ring outside).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod

import msgspec

from clustersim.core.errors import ProgramError, ScenarioError, nearest, nearest_divisor

ORDERS = {
    "megatron": "tp-cp-ep-dp-pp",
    "torchtitan": "tp-cp-ep-dp-pp",
    "deepspeed": "tp-cp-ep-dp-pp",
    "llama3": "tp-cp-ep-pp-dp",
}
"""Orders by whose they are, the fastest-varying dimension first. torchtitan's mesh [pp, dp_replicate, dp_shard, cp, tp]
(distributed/parallel_dims.py) and DeepSpeed's axes (pipe, data, model) (runtime/pipe/topology.py) name the last axis
fastest and come to Megatron's order; Llama 3 has data parallelism outermost (arXiv 2407.21783 s3.3.2)."""

DENSE = ("tp", "cp", "dp", "pp")
EXPERT = ("etp", "ep", "edp", "pp")
NAMES = (*DENSE, "etp", "ep", "edp", "dp_replicate", "dp_shard", "efsdp", "cp_a2a", "cp_p2p")
"""Every dimension that groups can be asked for; ``embd`` beside them is the first and the last stage."""

_PARTS = {
    "cp": ("cp_a2a", "cp_p2p"),
    "dp": ("dp_shard", "dp_replicate"),
    "edp": ("efsdp", "edp_replicate"),
}
"""A dimension's own dimensions, fastest first."""
_OF_EXPERTS = {"tp": "etp", "dp": "edp", "dp_replicate": "edp_replicate", "dp_shard": "efsdp"}
"""What a dimension is called among experts."""


class Dims(msgspec.Struct, frozen=True, dict=True):
    """Degrees of parallelism over a world of ``tp * cp * dp * pp`` ranks.

    Parameters
    ----------
    tp, cp, pp, dp : ranks of a tensor-, context-, pipeline- and data-parallel group.
    ep, etp : ranks that share out a layer's experts, and ranks that cut each expert; None is ``tp``, as in Megatron.
    dp_replicate : groups of dp that hold the same shard; ``dp_shard = dp / dp_replicate``.
    cp_a2a : of cp, ranks joined by the inner all-to-all (``a2a+p2p``); the ring goes over the others.
    order : dimensions joined by ``-``, the fastest-varying first, or one of :data:`ORDERS`. Missing ones have degree 1.

    Raises :class:`ScenarioError` for degrees below 1, products that do not divide, an order that misses a dimension, or
    one in which the pipelines of dense layers and of experts would be different ranks.

    >>> dims = Dims(tp=4, cp=2, pp=2, dp=4, ep=8, etp=1)
    >>> dims.world, dims.edp, dims.size("dp", "cp")
    (64, 4, 8)
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    dp_replicate: int = 1
    cp_a2a: int = 1
    order: str = ORDERS["megatron"]

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "pp", "dp", "ep", "etp", "dp_replicate", "cp_a2a"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ScenarioError(f"{name} = {value}: a degree is at least 1 (at $.parallel.{name})")
        self._check_order()
        self._check_divides("dp", self.dp, "dp_replicate", self.dp_replicate)
        self._check_divides("cp", self.cp, "cp_a2a", self.cp_a2a)
        experts = (self.etp or self.tp) * self.ep * self.pp
        if self.world % experts:
            raise ScenarioError(
                f"experts do not fit: etp {self.etp or self.tp} * ep {self.ep} * pp {self.pp} = {experts} does not "
                f"divide the world of {self.world} (at $.parallel.ep)"
            )
        self._check_divides("edp", self.edp, "dp_replicate", self.dp_replicate)
        # Without experts Llama 3's order may have context parallelism inside the pipeline and data parallelism outside.
        if (self.ep > 1 or self.etp is not None) and not self._same_pipelines():
            raise ScenarioError(
                f"order {self.order!r} gives dense layers (dp {self.dp}) and experts (edp {self.edp}) different "
                "pipelines; end it in pp, or make dp and edp equal (at $.parallel.order)"
            )

    def _check_order(self) -> None:
        tokens = self.tokens
        if unknown := [name for name in tokens if name not in ("tp", "cp", "ep", "dp", "pp")]:
            raise ScenarioError(
                f"order {self.order!r}: {unknown[0]!r} is no dimension; {nearest(unknown[0], [*ORDERS, *DENSE, 'ep'])} "
                "(at $.parallel.order)"
            )
        if len(set(tokens)) < len(tokens):
            raise ScenarioError(f"order {self.order!r} names a dimension twice (at $.parallel.order)")
        for name in ("tp", "cp", "ep", "dp", "pp"):
            if name not in tokens and getattr(self, name) > 1:
                raise ScenarioError(
                    f"order {self.order!r} leaves out {name}, whose degree is {getattr(self, name)} "
                    "(at $.parallel.order)"
                )

    def _check_divides(self, divided: str, degree: int, part: str, value: int) -> None:
        if degree % value:
            near = nearest_divisor(degree, value)
            raise ScenarioError(f"{part} = {value} does not divide {divided} {degree}; {near} (at $.parallel.{part})")

    @property
    def tokens(self) -> list[str]:
        """The order's dimensions, fastest first."""
        return ORDERS.get(self.order, self.order).lower().split("-")

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def dp_shard(self) -> int:
        """Ranks of dp that share one copy; FSDP's shard mesh is ``dp_shard * cp``."""
        return self.dp // self.dp_replicate

    @property
    def edp(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.world // ((self.etp or self.tp) * self.ep * self.pp)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Degree of every dimension, the parts of compound ones too."""
        return {
            **{name: getattr(self, name) for name in ("tp", "cp", "dp", "pp", "ep", "edp", "dp_replicate", "dp_shard")},
            "etp": self.etp or self.tp,
            "cp_a2a": self.cp_a2a,
            "cp_p2p": self.cp // self.cp_a2a,
            "efsdp": self.edp // self.dp_replicate,
            "edp_replicate": self.dp_replicate,
        }

    def size(self, *names: str) -> int:
        """Ranks of a group over these dimensions. Raises :class:`ProgramError` as :meth:`axes_of` does."""
        return self.size_of(self.axes_of(*names)[1])

    def size_of(self, axes: Sequence[str]) -> int:
        """Ranks of a group over these axes of one factorisation."""
        return prod(self.sizes[axis] for axis in axes)

    @cached_property
    def dense_axes(self) -> tuple[str, ...]:
        """Axes of the dense factorisation, fastest first; none of them is compound."""
        return self._axes(DENSE, [name for name in self.tokens if name != "ep"])

    @cached_property
    def expert_axes(self) -> tuple[str, ...]:
        """Axes of the experts' factorisation, fastest first."""
        ordered = [_OF_EXPERTS.get(name, name) for name in self.tokens if name != "cp"]
        return self._axes(EXPERT, ordered)

    @staticmethod
    def _axes(names: Sequence[str], ordered: Sequence[str]) -> tuple[str, ...]:
        # RankGenerator appends what an order leaves out; its degree is 1.
        all_names = [*ordered, *(name for name in names if name not in ordered)]
        return tuple(axis for name in all_names for axis in _PARTS.get(name, (name,)))

    def axes_of(self, *names: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """All axes of the factorisation that these dimensions belong to, and the axes these are made of.

        Beside an experts' dimension, ``tp`` and ``dp`` mean the experts' own (etp, edp), as in Megatron's
        ``get_expert_tensor_and_model_parallel_group``.

        Raises :class:`ProgramError` for an unknown dimension, and for ``cp`` beside one of the experts', which are
        spread over the context-parallel ranks.
        """
        for name in names:
            if name not in NAMES:
                raise ProgramError(f"no dimension {name!r} in a mesh; {nearest(name, (*NAMES, 'embd'))}")
        experts = bool({"etp", "ep", "edp", "efsdp"} & set(names))
        axes = self.expert_axes if experts else self.dense_axes
        own = [_OF_EXPERTS.get(name, name) if experts else name for name in names]
        chosen = {axis for name in own for axis in _PARTS.get(name, (name,))}
        if stray := sorted(chosen - set(axes)):
            raise ProgramError(
                f"no groups over {', '.join(names)}: {stray[0]!r} is no dimension of the experts, who are spread over "
                f"{', '.join(EXPERT)}"
            )
        return axes, tuple(axis for axis in axes if axis in chosen)

    def _same_pipelines(self) -> bool:
        """Whether a step along pp is as many ranks for dense layers as for experts."""
        return self.pp == 1 or self._stride(self.dense_axes) == self._stride(self.expert_axes)

    def _stride(self, axes: Sequence[str]) -> int:
        return self.size_of(axes[: axes.index("pp")])


def powers_of_two(most: int) -> list[int]:
    """Degrees that machines are usually divided by.

    >>> powers_of_two(12)
    [1, 2, 4, 8]
    """
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]
