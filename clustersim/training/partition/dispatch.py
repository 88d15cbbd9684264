"""How tokens reach their experts and come back, as exchanges in the order a rank issues them.

Megatron-LM core/transformer/moe/{token_dispatcher,fused_a2a}.py. ``alltoall``: every copy of a token goes to its
expert's position. ``allgather``: all tokens go everywhere. Each is a pair of journeys, and backward makes the same ones
with gradients. ``flex`` is two hops: one copy per node, then one per rank over NVLink (deepseek-ai/DeepEP).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import msgspec
import numpy as np

from clustersim.core.byte_matrix import ByteMatrix, byte_matrix
from clustersim.core.model import Kernel
from clustersim.core.program import ExchangeKernel
from clustersim.training.partition.base import Exchange
from clustersim.training.partition.nodes import TRAFFIC, WAITS, Kernels, NodeListing, scaled
from clustersim.training.partition.routing import RoutedTokens, distinct, in_turn

EP = ("ep",)
ETP = ("etp",)
BOTH = ("etp", "ep")
FLOAT8_ROW = 1.0 + 4.0 / 128.0
"""Bytes of an element in 8 bits, with the fp32 scale that 128 of them share (DeepEP's ``dispatch`` of two tensors)."""
INDEX = 4.0
"""Of a 64-bit index, elements of 16 bits."""
WEIGHT = 2.0
"""Of a weight in fp32, the same."""
HOST_WAITS = 3
"""Host operations the device stands still for when the host reads counts: the copy, the wake-up, the next launch."""


AHEAD_OF_EXPERTS = ("norm_router", "router", "top_k", "norm_experts", "expert_latent_in")
BEHIND_EXPERTS = ("expert_latent_out", "norm_behind_experts")
BEHIND_SHARED = ("shared_scale", "norm_behind_shared", "shared_sum")
"""Kernels of a mixture of experts that see every token where it is."""
_WHERE_TOKENS_ARE = frozenset((*AHEAD_OF_EXPERTS, *BEHIND_EXPERTS, *BEHIND_SHARED))


class Mixture(msgspec.Struct, frozen=True):
    """Sizes of a mixture of experts.

    tokens : per sample. hidden : width of the model. row : elements of a token on its way to an expert.
    experts, per_token : E and k.
    groups, group_limit : a token's experts are all in so many of the groups; 0 for no limit.
    """

    tokens: int
    hidden: int
    row: int
    experts: int
    per_token: int
    groups: int = 0
    group_limit: int = 0


class ExpertSpread(msgspec.Struct, frozen=True):
    """How the experts of one layer are spread over ranks, and how tokens reach them.

    Parameters
    ----------
    ep, etp : positions, and ranks that cut each expert. tokens : of one rank per sample.
    routed : what positions send and receive. per_node : positions of a node.
    kind, backend : ``dispatcher`` and ``flex_backend``.
    counted : sizes are not known before the router spoke (dropless), so that the host has to read them.
    sms : that DeepEP's kernels run on. float8 : what travels to the experts is in 8 bits.
    fused : tokens are permuted by one pass, and summed by one. varying : how many rows a rank sends is not known before
    its counts are, since some are dropped, or padded. masked : rows are picked by a mask, whose sum the host reads
    (Megatron-LM core/transformer/moe/moe_utils.py, ``permute``: ``masked_select``). alike : ranks that cut the same
    experts are all sent all rows of these, by one of the ranks of each position.
    """

    mixture: Mixture
    ep: int
    etp: int
    tokens: float
    routed: RoutedTokens
    per_node: int
    kind: str = "alltoall"
    backend: str = "deepep"
    counted: bool = True
    sms: int = 20
    float8: bool = False
    fused: bool = False
    varying: bool = False
    masked: bool = False
    alike: bool = False

    @property
    def permuted(self) -> float:
        """Rows of a sample that a fused permutation reads and writes: each token once where it is (of ``flex`` each
        copy that came), and once for each of its experts (Transformer Engine common/triton/permutation.py)."""
        copies = copies_of(self)["nvlink"][0] if self.kind == "flex" and self.ep > 1 else 1.0
        return self.routed.rows + self.tokens * copies

    @property
    def received(self) -> float:
        """Rows the experts of one rank compute per sample: its position's, from all ranks that cut the same experts."""
        return self.routed.rows * (1 if self.alike else self.etp)


class Dispatcher(Protocol):
    """How tokens travel. ``part`` is F, or R where backward repeats a forward."""

    @property
    def by_sender(self) -> bool:
        """Whether tokens are copied and permuted where they are, and summed when they are back."""

    def prepare(self, out: NodeListing, part: str) -> None:
        """What must be known before tokens are permuted."""

    def there(self, out: NodeListing, part: str) -> None:
        """Tokens to their experts."""

    def home(self, out: NodeListing, part: str) -> None:
        """Outputs to their tokens."""

    def gradient_there(self, out: NodeListing) -> None:
        """Gradients of the outputs to the experts."""

    def gradient_home(self, out: NodeListing) -> None:
        """Gradients of inputs, and of the weights outputs are summed by, to their tokens."""

    def sorting(self, permute: Kernel, unpermute: Kernel) -> tuple[Kernels, Kernels]:
        """What brings rows into the order of experts where these are, and back."""


def is_expert(kernel: Kernel) -> bool:
    """Whether a kernel is of a mixture of experts, its router and shared experts included."""
    return kernel.cut.startswith("expert") or kernel.name.startswith("shared_") or kernel.name in _WHERE_TOKENS_ARE


def read_counts(out: NodeListing, part: str, name: str = "read_counts") -> None:
    """The host copies counts from the device and waits, before it launches what depends on them."""
    out.work(WAITS, (Kernel(name, "host", launches=HOST_WAITS, backward_launches=0),), part)


class AllToAll(msgspec.Struct, frozen=True):
    """Each copy of a token to its expert's position; ranks that cut the same experts gather their rows."""

    spread: ExpertSpread
    by_sender: bool = True

    def prepare(self, out: NodeListing, part: str) -> None:
        """Counts of everybody. How many rows a rank permutes is known without them, unless it varies, or a mask picks
        them."""
        s = self.spread
        if s.counted and s.ep * s.etp > 1:
            size = float(s.mixture.experts * s.ep * s.etp)
            out.exchange(Exchange("tokens per expert", "all_gather", BOTH, size, part, dtype="int64", per_sample=False))
        if s.counted and (s.varying or s.masked):
            read_counts(out, part)

    def there(self, out: NodeListing, part: str) -> None:
        """The host reads the counts, if it has not yet; then hidden states and weights go, both to all ranks of an
        expert (Megatron-LM core/transformer/moe/token_dispatcher.py, ``_maybe_update_cuda_sync_point``)."""
        s = self.spread
        if s.counted and not (s.varying or s.masked):
            read_counts(out, part)
        self._swap(out, "dispatch", s.mixture.row, part)
        self._swap(out, "dispatch probs", 1, part)
        self._over_etp(out, "dispatch", "all_gather", s.mixture.row, part)
        self._over_etp(out, "dispatch probs", "all_gather", 1, part)

    def home(self, out: NodeListing, part: str) -> None:
        """Partial sums of an expert's ranks, then each row to its token."""
        h = self.spread.mixture.row
        self._over_etp(out, "combine", "reduce_scatter", h, part)
        self._swap(out, "combine", h, part, home=True)

    def gradient_there(self, out: NodeListing) -> None:
        """The adjoint of :meth:`home`."""
        h = self.spread.mixture.row
        self._swap(out, "combine gradient", h, "I")
        self._over_etp(out, "combine gradient", "all_gather", h, "I")

    def gradient_home(self, out: NodeListing) -> None:
        """The adjoint of :meth:`there`, whose counts are known by now."""
        h = self.spread.mixture.row
        self._over_etp(out, "dispatch probs gradient", "reduce_scatter", 1, "I")
        self._over_etp(out, "dispatch gradient", "reduce_scatter", h, "I")
        self._swap(out, "dispatch probs gradient", 1, "I", home=True)
        self._swap(out, "dispatch gradient", h, "I", home=True)

    def sorting(self, permute: Kernel, unpermute: Kernel) -> tuple[Kernels, Kernels]:
        """Rows arrive by sender; where a rank has several experts they are sorted by expert."""
        s = self.spread
        if s.ep * s.etp == 1 or s.mixture.experts == s.ep:
            return (), ()
        moved = 2.0 * s.received * s.mixture.row
        sort_kernel = Kernel(
            "sort_rows", "memory", nbytes=moved, backward_nbytes=moved, backward_launches=1, cut="expert"
        )
        return (sort_kernel,), (replace(sort_kernel, name="unsort_rows"),)

    def _swap(self, out: NodeListing, exchange_name: str, width: int, part: str, *, home: bool = False) -> None:
        """The all_to_all of one tensor; weights (one number a row) are fp32."""
        s = self.spread
        if s.ep > 1:
            matrix = s.routed.returning if home else s.routed.matrix
            dtype = "fp32" if width == 1 else None
            out.exchange(
                Exchange(exchange_name, "all_to_all", EP, s.routed.rows * width, part, dtype=dtype, matrix=matrix)
            )

    def _over_etp(self, out: NodeListing, exchange_name: str, kind: str, width: int, part: str) -> None:
        s = self.spread
        if s.etp > 1:
            dtype = "fp32" if width == 1 else None
            out.exchange(Exchange(f"{exchange_name} over etp", kind, ETP, s.received * width, part, dtype=dtype))


class AllGather(msgspec.Struct, frozen=True):
    """All tokens of all ranks everywhere, with the map of who wants whom; sums are scattered. Megatron's default."""

    spread: ExpertSpread
    by_sender: bool = False

    def prepare(self, out: NodeListing, part: str) -> None:
        """Nothing."""

    def there(self, out: NodeListing, part: str) -> None:
        """The map of choices, their weights (fp32), the hidden states; then the host reads the counts."""
        self._exchange(out, "dispatch map", "all_gather", self.spread.mixture.experts, part, "uint8")
        self._exchange(out, "dispatch probs", "all_gather", self.spread.mixture.experts, part, "fp32")
        self._exchange(out, "dispatch", "all_gather", self.spread.mixture.row, part)
        read_counts(out, part)

    def home(self, out: NodeListing, part: str) -> None:
        """Every rank's part of every token's sum."""
        self._exchange(out, "combine", "reduce_scatter", self.spread.mixture.row, part)

    def gradient_there(self, out: NodeListing) -> None:
        """The adjoint of :meth:`home`."""
        self._exchange(out, "combine gradient", "all_gather", self.spread.mixture.row, "I")

    def gradient_home(self, out: NodeListing) -> None:
        """The adjoint of :meth:`there`; a map has no gradient."""
        self._exchange(out, "dispatch gradient", "reduce_scatter", self.spread.mixture.row, "I")
        self._exchange(out, "dispatch probs gradient", "reduce_scatter", self.spread.mixture.experts, "I", "fp32")

    def sorting(self, permute: Kernel, unpermute: Kernel) -> tuple[Kernels, Kernels]:
        """Rows for the own experts are picked out of all tokens, and summed into them."""
        etp = self.spread.etp
        return (scaled(permute, etp, TRAFFIC),), (scaled(unpermute, etp, TRAFFIC),)

    def _exchange(
        self, out: NodeListing, exchange_name: str, kind: str, width: int, part: str, dtype: str | None = None
    ) -> None:
        s = self.spread
        if s.ep * s.etp > 1:
            out.exchange(Exchange(exchange_name, kind, BOTH, s.tokens * s.ep * s.etp * width, part, dtype=dtype))


class TwoHops(msgspec.Struct, frozen=True):
    """One copy of a token per node that wants it, to the GPU of the sender's place there, and from it one per rank.

    Both hops are one kernel that pipelines them, so the exchanges run beside each other. Weights travel inside.
    """

    spread: ExpertSpread
    by_sender: bool = False

    def prepare(self, out: NodeListing, part: str) -> None:
        """Counts are the kernel's own; DeepEP takes indices in place of the router's map, and where they go.

        HybridEP gathers the router's map of all ranks, a byte for each token and expert, and makes of it where each
        rank's tokens go (32-bit places) and where those that come have their rows: deepseek-ai/DeepEP branch hybrid-ep,
        deep_ep/hybrid_ep_buffer.py, ``dispatch_with_permute``, and csrc/hybrid_ep/executor/executor.cu.

        Megatron-LM core/transformer/moe/{token_dispatcher,fused_a2a}.py: ``_DeepepManager``, ``get_dispatch_layout``.
        """
        s = self.spread
        if s.ep > 1 and s.backend == "hybridep":
            chosen = s.tokens * s.mixture.experts
            out.exchange(Exchange("dispatch map", "all_gather", EP, chosen * s.ep, part, dtype="uint8"))
            came = s.tokens * copies_of(s)["nvlink"][0] * s.mixture.experts / s.ep
            moved = chosen * (s.ep + 1) + 4.0 * s.tokens * s.per_node + (1.0 + 4.0) * came
            out.work("preprocess", (Kernel("routing_scan", "memory", nbytes=moved / 2.0, launches=2),), part)
        if s.ep > 1 and s.backend != "hybridep":
            chosen = INDEX * s.tokens * s.mixture.per_token
            indices = Kernel("token_indices", "memory", nbytes=2.0 * s.tokens * s.mixture.experts + chosen, launches=1)
            out.work("preprocess", (indices, Kernel("dispatch_layout", "memory", nbytes=chosen, launches=1)), part)

    def there(self, out: NodeListing, part: str) -> None:
        """Dispatch, ahead of which the host spins until counts are there; of HybridEP too unless it is told how many
        rows will come (Megatron-LM core/transformer/moe/fused_a2a.py, ``non_blocking``).

        Of what DeepEP brought a mask picks rows, unless one kernel does it: the host waits for the dispatch itself
        (core/transformer/moe/token_dispatcher.py, ``_indices_to_multihot``).
        """
        s = self.spread
        if s.counted:
            read_counts(out, part, "await_counts")
        self._hops(out, "dispatch", part, weighted=True)
        if s.masked and s.ep > 1 and s.backend != "hybridep":
            read_counts(out, part, "await_rows")

    def home(self, out: NodeListing, part: str) -> None:
        """Combine: sums inside a node, then one row per node."""
        self._hops(out, "combine", part, home=True)

    def gradient_there(self, out: NodeListing) -> None:
        """A dispatch."""
        self._hops(out, "combine gradient", "I")

    def gradient_home(self, out: NodeListing) -> None:
        """A combine, which takes the gradients of weights home."""
        self._hops(out, "dispatch gradient", "I", home=True, weighted=True)

    def sorting(self, permute: Kernel, unpermute: Kernel) -> tuple[Kernels, Kernels]:
        """Rows of a rank's tokens are copied for each of its experts, and summed into them; of DeepEP's indices a map
        is made first."""
        s = self.spread
        if s.float8:
            share = FLOAT8_ROW / 2.0
            permute = scaled(permute, share, ("nbytes",))
            unpermute = scaled(unpermute, share, ("backward_nbytes",))
        if s.ep == 1 or s.backend == "hybridep":
            return (permute,), (unpermute,)
        mapped = s.received * (s.mixture.experts // s.ep)
        token_map = Kernel(
            "token_map", "memory", nbytes=mapped, backward_nbytes=mapped, launches=1, backward_launches=1, cut="expert"
        )
        return (token_map, permute), (unpermute,)

    def _hops(
        self, out: NodeListing, exchange_name: str, part: str, *, home: bool = False, weighted: bool = False
    ) -> None:
        if self.spread.ep > 1:
            before = out.waiting
            both = hops(self.spread, exchange_name, part, home=home, weighted=weighted)
            out.waiting = tuple(out.beside(msgspec.structs.replace(exchange, needs=before)) for exchange in both)


def hops(
    s: ExpertSpread, exchange_name: str, part: str, *, home: bool = False, weighted: bool = False
) -> tuple[Exchange, ...]:
    """The exchanges of one dispatch, or of one combine (``home``), by two hops: they run beside each other.

    Both are one kernel, which takes its SMs from other kernels once, while it sends to other nodes: the longer hop, as
    long as a GPU's NIC has a fraction of the rate of its NVLink.

    ``weighted`` : weights travel with tokens, or their gradients. With each copy HybridEP sends one in fp32 for every
    expert that the hop's end can reach over NVLink, chosen or not (deepseek-ai/DeepEP branch hybrid-ep, csrc/hybrid_ep/
    buffer/intranode.cu, ``expert_output_prob``); what DeepEP sends for the chosen is in what its kernels were timed by.
    """
    phase = "combine" if home else "dispatch"
    row = s.mixture.row * (FLOAT8_ROW if s.float8 and not home else 1.0)
    if weighted and s.backend == "hybridep":
        row += WEIGHT * s.mixture.experts * s.per_node / s.ep
    exchanges = []
    carried = copies_of(s)
    for hop, (copies, matrix) in carried.items():
        directed = byte_matrix(matrix.array.T.tolist()) if matrix is not None and home else matrix
        far = hop == "rdma"
        kernel = ExchangeKernel(s.backend, phase, row, copies, s.sms, far, within=not far and len(carried) > 1)
        exchanges.append(
            Exchange(
                f"{exchange_name} {hop}",
                "all_to_all",
                EP,
                s.tokens * row * copies,
                part,
                dtype="fp8" if s.float8 and not home else None,
                communicator=f"ep {hop}",
                matrix=directed,
                kernel=kernel,
            )
        )
    return tuple(exchanges)


def copies_of(s: ExpertSpread) -> dict[str, tuple[float, ByteMatrix | None]]:
    """Copies of a token each hop carries, and between whom.

    Uniform choices of k experts fall into ``distinct`` ranks and nodes, those of a router that takes experts
    ``in_turn`` into fewer; busier positions get more in proportion. What a rank brings over its own NVLink from other
    nodes' ranks of its place, it hands on itself, so that each hands on as many copies as it sends.
    """
    m = s.mixture
    nodes = s.ep // s.per_node
    limited = m.group_limit and nodes % m.groups == 0 and not s.routed.in_turn
    part = m.group_limit / m.groups if limited else 1.0
    experts = round(m.experts * part)
    fallen_into = in_turn if s.routed.in_turn else distinct
    ranks = fallen_into(round(s.ep * part), experts, m.per_token)
    if nodes == 1:
        return {"nvlink": (ranks, s.routed.matrix)}
    load = np.array(s.routed.load or (1.0,) * s.ep)
    node, place = np.divmod(np.arange(s.ep), s.per_node)
    same = node[:, None] == node[None, :]
    near = np.where(same, load[None, :] / s.per_node, 0.0)
    of_node = np.bincount(node, load)[node] / s.per_node
    far = np.where(~same & (place[:, None] == place[None, :]), of_node[None, :] / (nodes - 1), 0.0)
    away = fallen_into(round(nodes * part), experts, m.per_token) * (nodes - 1) / nodes
    return {"rdma": (away, byte_matrix(far.tolist())), "nvlink": (ranks, byte_matrix(near.tolist()))}
