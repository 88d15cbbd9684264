"""Parameter tensors of a block's experts and of the MLP of blocks without, by the parts of a family's row."""

from __future__ import annotations

from dataclasses import replace

from clustersim.core.model import Tensor
from clustersim.model.base import Experts, TransformerShape
from clustersim.model.tensor_parts import Part, Tensors, linear, linear_part, tensor_part

_GATED = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}


_GATED_W = {"w1": "column", "w2": "row", "w3": "column"}


_PLAIN_W = {"w1": "column", "w2": "row"}


_PLAIN = {"up_proj": "column", "down_proj": "row"}


def _mlp(
    name: str, s: TransformerShape, width: int, names: dict[str, str], kind: str = "", *, bias: bool = False
) -> Tensors:
    """Projections of one MLP in the order of ``names``, each with how it is cut."""
    sizes = {"column": (s.d_model, width), "row": (width, s.d_model)}
    return tuple(
        tensor
        for projection, cut in names.items()
        for tensor in linear(f"{name}.{projection}", *sizes[cut], kind + cut, bias=bias)
    )


def expert_parts(s: TransformerShape, e: Experts | None) -> dict[str, Part]:
    """Of a block with experts (none where it has no experts), and of the MLP that it has without."""
    names = _GATED if s.gated else _PLAIN
    if e is None:
        absent = ["router", "experts", "experts_w", "experts_joined", "correction", "shared", "shared_plain"]
        absent += ["shared_joined", "shared_gate", "latent_in", "latent_out", "experts_stacked"]
        absent += ["shared_gate_up", "expert_norm", "norm_behind_experts", "router_scale", "expert_scale"]
        parts: dict[str, Part] = {part: lambda _: () for part in absent}
        there = s.d_ff > 0
        parts["dense_joined"] = lambda name: _shared_joined(name, s, s.d_ff) if there else ()
        parts["dense"] = lambda name: _mlp(name, s, s.d_ff, names, bias=s.mlp_bias) if there else ()
        return parts

    row = e.row(s.d_model)
    routed = replace(s, d_model=row)

    def each(names: dict[str, str]) -> Part:
        """The experts' tensors, with these names of parts."""
        if s.experts_joined:
            return lambda name: _joined(name, routed, e)
        every = range(e.count)
        return lambda name: tuple(t for i in every for t in _mlp(f"{name}.{i}", routed, e.width, names, "expert_"))

    return {
        "router": linear_part(s.d_model, e.count + e.zero, bias=e.bias),
        "expert_norm": linear_part(1, s.d_model, bias=s.norm_bias, there=e.norms),
        "norm_behind_experts": linear_part(1, s.d_model, bias=s.norm_bias, there=s.norm_places == "behind_experts"),
        "router_scale": tensor_part(s.d_model, there=e.scales),
        "expert_scale": tensor_part(e.count, there=e.scales),
        "experts": each(names),
        "experts_w": each(_GATED_W if s.gated else _PLAIN_W),
        "experts_joined": lambda name: _joined(name, routed, e),
        "experts_stacked": lambda name: _stacked(name, routed, e),
        "latent_in": linear_part(s.d_model, row, bias=s.mlp_bias, there=e.latent > 0),
        "latent_out": linear_part(row, s.d_model, bias=s.mlp_bias, there=e.latent > 0),
        "correction": tensor_part(e.count + e.zero, there=e.correction),
        "shared": lambda name: _mlp(name, s, e.shared, names, bias=s.mlp_bias) if e.shared else (),
        "shared_plain": lambda name: _mlp(name, s, e.shared, names) if e.shared else (),
        "shared_gate_up": lambda name: _shared_gate_up(name, s, e.shared) if e.shared else (),
        "shared_joined": lambda name: _shared_joined(name, s, e.shared) if e.shared else (),
        "shared_gate": linear_part(s.d_model, 1, there=e.shared_gate),
        "dense": lambda _: (),
        "dense_joined": lambda _: (),
    }


def _joined(name: str, s: TransformerShape, e: Experts) -> Tensors:
    """One tensor for all experts' gate and up, one for their down, as transformers 5 has them."""
    n = e.count
    h = s.d_model
    f = e.width
    wide = 2 * f if s.gated else f
    up = f"{name}.{'gate_up' if s.gated else 'up'}_proj"
    down = f"{name}.down_proj"
    tensors = [Tensor(up, n * h * wide, cut="expert_column", width=h * wide)]
    if e.bias:
        tensors.append(Tensor(f"{up}_bias", n * wide, cut="expert_column", width=wide))
    tensors.append(Tensor(down, n * f * h, cut="expert_row", width=f * h))
    if e.bias:
        tensors.append(Tensor(f"{down}_bias", n * h, cut="expert", width=h))
    return tuple(tensors)


def _stacked(name: str, s: TransformerShape, e: Experts) -> Tensors:
    """One tensor each for all experts' gates, ups and downs (DBRX)."""
    each = e.width * s.d_model
    cuts = {"w1": "expert_column", "v1": "expert_column", "w2": "expert_row"}
    return tuple(Tensor(f"{name}.{part}", e.count * each, cut=cut, width=each) for part, cut in cuts.items())


def _shared_gate_up(name: str, s: TransformerShape, width: int) -> Tensors:
    """The same under other names (MiniMax-M3)."""
    up = linear(f"{name}.gate_up_proj", s.d_model, 2 * width, "column")
    return (*up, *linear(f"{name}.down_proj", width, s.d_model, "row"))


def _shared_joined(name: str, s: TransformerShape, width: int) -> Tensors:
    """Gate and up of a shared expert as one (Granite)."""
    up = linear(f"{name}.input_linear", s.d_model, 2 * width, "column")
    return (*up, *linear(f"{name}.output_linear", width, s.d_model, "row"))
