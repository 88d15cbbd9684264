"""Kernels of a mixture of experts: router, dispatch, the experts' products as groups, the weighted sum.

The products of all experts are one :class:`~clustersim.core.model.Kernel` with ``repeat``: launched one expert after
the other, as Hugging Face's loop does it, or in one launch (``experts_implementation = "grouped_mm"``).
"""

from __future__ import annotations

from dataclasses import replace

from clustersim.core.model import Kernel
from clustersim.model import kernels as K
from clustersim.model.base import Experts, TransformerShape

Kernels = tuple[Kernel, ...]
EXPERT_NORMS = ("norm_router", "norm_experts", "norm_behind_experts", "norm_behind_shared")
"""Norms of the router's input, of the routed experts' input and output, and of the output of what every token visits,
whose input the block's own norm makes."""


def expert_kernels(s: TransformerShape, e: Experts) -> Kernels:
    """Everything that stands where a dense block has its MLP; each expert sees its even share of the tokens."""
    t = s.seq_len
    h = s.d_model
    row = e.row(h)
    routed = float(t * e.per_token)
    # To a narrower width and back, whole on every rank; the router keeps the input they share.
    narrowed = (K.sharing_input(K.linear("expert_latent_in", t, h, row)),) if e.latent else ()
    widened = (K.linear("expert_latent_out", t, row, h),) if e.latent else ()
    # The loop has an index_add and its index for each expert.
    indices = (1, 1) if s.experts_implementation == "grouped_mm" else (2 * e.count, 2 * e.count)
    ahead = {name: K.norm(s, name) for name in EXPERT_NORMS} if e.norms else {}
    return (
        *_listed(ahead, "norm_router"),
        # Its n is the experts that compute.
        replace(K.linear("router", t, h, e.count + e.zero), n=e.count),
        # Its n and k: groups of experts, and how many of them a token's experts may be in.
        replace(K.memory("top_k", float(t * (e.count + e.zero)), K.Passes(6, 6, 6, 6)), n=e.groups, k=e.group_limit),
        *_listed(ahead, "norm_experts"),
        *narrowed,
        K.memory("dispatch", routed * row, K.Passes(2, 3), cut="expert"),
        *routed_kernels(s, e, routed),
        # The gradients of the weights it sums by need what the experts said.
        K.memory("combine", routed * row, K.Passes(5, 5, *indices), cut="expert", saved=1),
        *widened,
        *_listed(ahead, "norm_behind_experts"),
        *_shared_kernels(s, e),
    )


def _listed(norms: dict[str, Kernel], name: str) -> Kernels:
    """A norm, where there is one."""
    return (norms[name],) if name in norms else ()


def routed_kernels(s: TransformerShape, e: Experts, routed: float) -> Kernels:
    """Gate, up, activation and down of ``e.count`` experts on ``routed`` rows per sample together."""
    h = e.row(s.d_model)
    f = e.width
    activation = K.mlp_activation(s, "expert_activation", routed * f)
    times = launches_of(s, e.count)
    up = grouped(s, "expert_up", e.count, routed, (h, f))
    activation = replace(
        activation,
        cut="expert",
        launches=activation.launches * times,
        backward_launches=activation.backward_launches * times,
        n=int(e.clamped),
    )
    wide = routed * (f * (1 + s.gated) + h)
    # Sums of a bias per row behind the products; backward sums columns.
    biases = K.memory("expert_bias", wide, K.Passes(2, 1, 2 * times, 2 * times), cut="expert")
    if s.fuses:
        biases = K.memory("expert_bias", routed * h, _weighted_bias(e.count), cut="expert")
    return (
        *((grouped(s, "expert_gate", e.count, routed, (h, f)),) if s.gated else ()),
        K.sharing_input(up) if s.gated else up,
        activation,
        grouped(s, "expert_down", e.count, routed, (f, h), "expert_row"),
        *((biases,) if e.bias else ()),
    )


def _weighted_bias(count: int) -> K.Passes:
    """Megatron-LM's bias behind the experts' last product (core/transformer/moe/experts.py, ``_apply_bias``), which no
    kernel fuses: one expert after the other it is weighted by its tokens' fp32 probabilities and added, then all are
    joined and cast. Passes are of 16-bit elements: fp32 ones are two. The first product's bias rides on the product.
    """
    # Forward: b p written (2), t + b p (1 + 2, 2), joined (2, 2), cast (2, 1). Backward: of the cast and of the sum
    # (1, 2; 2, 1), the pieces joined (1, 1), and of b p two products and their sums (2, 2, 2 each).
    return K.Passes(14, 20, 2 * count + 2, 6 * count + 3)


def grouped(
    s: TransformerShape, name: str, count: int, routed: float, sizes: tuple[int, int], cut: str = "expert_column"
) -> Kernel:
    """``count`` products with weights of equal ``sizes`` (in, out) on ``routed`` rows per sample together."""
    share, (n_in, n_out) = routed / count, sizes
    flops = 2.0 * routed * n_in * n_out
    moved = routed * (n_in + n_out)
    times = launches_of(s, count)
    return Kernel(
        name,
        "gemm",
        m=max(1, round(share)),
        n=n_out,
        k=n_in,
        flops=flops,
        backward_flops=2 * flops,
        nbytes=moved,
        backward_nbytes=2 * moved,
        launches=times,
        backward_launches=2 * times,
        cut=cut,
        repeat=count,
        saved=routed * n_in,
    )


def launches_of(s: TransformerShape, count: int) -> int:
    """Kernels launched for one product of ``count`` experts."""
    return 1 if s.experts_implementation == "grouped_mm" else count


def _shared_kernels(s: TransformerShape, e: Experts) -> Kernels:
    """The MLP every token visits, its gate, and the sum with what routed experts say."""
    if not e.shared:
        return ()
    t = s.seq_len
    h = s.d_model
    # The router keeps the input they share, in 16 bits: what is cast of it, the first of them casts.
    scaled = (K.sharing_input(K.linear("shared_scale", t, h, 1)),) if e.shared_gate else ()
    wide = [K.linear(name, t, h, e.shared) for name in ("shared_gate",) * s.gated + ("shared_up",)]
    shared = [replace(K.sharing_input(kernel), cut="column") for kernel in wide]
    # Where a norm of its own stands before it, the router does not read what the first reads.
    first = replace(wide[0], cut="column") if e.norms else replace(shared[0], rebuilt=True)
    return (
        first,
        *shared[1:],
        K.mlp_activation(s, "shared_activation", float(t) * e.shared),
        replace(K.linear("shared_down", t, e.shared, h), cut="row"),
        *scaled,
        *((K.norm(s, "norm_behind_shared"),) if e.norms else ()),
        K.memory("shared_sum", float(t * h), K.Passes(3, 3)),
    )
