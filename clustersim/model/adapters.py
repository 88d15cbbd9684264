"""What of a model is trained: parts that are frozen, and low-rank adapters beside frozen products.

A frozen tensor has no gradient, no state of an optimizer and no product for its gradient, and what only that product
would read is not kept. Gradients of inputs flow back to the first tensor that is trained, and no further. An adapter
(LoRA, arXiv:2106.09685) adds to a product ``x W`` the product ``(x A) B`` of a low rank; under QLoRA (arXiv:2305.14314)
``W`` is kept in 4 bits and written out in 16 ahead of each product that reads it.

Modules are named as PEFT names them; what autograd keeps is checked with torch's MemTracker
(tests/test_adapters_torch.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import msgspec

from clustersim.core.errors import ModelError, few, nearest
from clustersim.core.model import ADAPTER, Kernel, Layer, Model, Tensor
from clustersim.model.adapter_setting import ALL_LINEAR, MEGATRON_LINEARS, Adapter, UnknownTarget, compiled, is_pattern
from clustersim.model.backward import LayerLinks, ProductLink, linked, rewritten


class Trained(msgspec.Struct, frozen=True):
    """What of a model is trained.

    Parameters
    ----------
    frozen : patterns of parameters' or modules' names that are not. adapter : beside what is not, None for none.
    element : bytes of a frozen element. wide : adapters are kept in fp32 beside 16-bit weights, as PEFT has them.
    to_blocks : gradients flow back to what comes into the first block, though nothing before it is trained: so it is
        where blocks are computed again (PEFT's ``enable_input_require_grads``, Megatron-Bridge peft/recompute.py).
    """

    frozen: tuple[str, ...] = ()
    adapter: Adapter | None = None
    element: float = 4.0
    wide: bool = False
    to_blocks: bool = False


def with_trained(model: Model, trained: Trained) -> Model:
    """The model with what is frozen marked, its backward cut to what that leaves, and adapters added.

    Raises :class:`ModelError` for a pattern or a target that names nothing, and for what is not played: adapters of
    experts and of anything but a linear, and frozen convolutions behind something that is trained.
    """
    _refuse_tied(model, trained)
    links = [linked(layer) for layer in model.layers]
    frozen = _frozen_names(model, trained)
    targets = _targets(model, links, trained.adapter) if trained.adapter else {}
    if clash := sorted(targets.keys() - frozen):
        raise ModelError(f"{model.name}: {clash[0]} is in modules_to_save and has an adapter; take it out of one")
    layers = []
    reached = False
    known: dict[object, Layer] = {}
    for layer, links_of in zip(model.layers, links, strict=True):
        marked = _marked(layer, links_of, frozen, trained)
        work = _Rewriting(links_of, trained.adapter, targets, trained.wide, trained.element)
        made = work.layer(layer, marked, known, reached=reached)
        layers.append(made)
        reached = reached or bool(made.trained) or (trained.to_blocks and layer.kind == "embedding")
    changed = replace(model, layers=tuple(layers))
    if not changed.trained:
        raise ModelError(f"{model.name}: nothing is trained; {few(sorted(trained.frozen), 3)} freeze every parameter")
    return replace(changed, notes=(*model.notes, *_notes(changed)))


def _notes(model: Model) -> tuple[str, ...]:
    """What is to be known of figures of it."""
    share = model.trained / model.parameters
    return (
        f"{model.trained:,} of {model.parameters:,} parameters are trained ({share:.2%}): FLOPs and MFU leave out the "
        "weight gradients of the others, which nobody computes",
    )


class _Rewriting(msgspec.Struct, frozen=True):
    """How layers change: their links, the adapter, the names of the weights that have one and Megatron's of the linear
    that they are, whether it is fp32, and bytes of a frozen element."""

    links: LayerLinks
    adapter: Adapter | None
    targets: Mapping[str, str]
    wide: bool
    element: float

    def layer(self, layer: Layer, tensors: tuple[Tensor, ...], known: dict[object, Layer], *, reached: bool) -> Layer:
        """A layer with its ``tensors`` marked; ``reached`` : something before it is trained."""
        adapted = {link.tensor for link in self.links.products if link.tensor in self.targets}
        here = tuple(link.tensor in adapted for link in self.links.products)
        state = tuple((t.frozen, t.element) for t in tensors)
        key = (layer.kernels, state, here, reached)
        if key not in known:
            kernels = rewritten(layer, self.links, tensors, reached=reached, adapted=adapted, add=self._beside)
            known[key] = replace(layer, kernels=kernels, activation_bytes=sum(kernel.saved for kernel in kernels))
        same = known[key]
        with_adapters = self._with_tensors(tensors, adapted)
        return replace(same, name=layer.name, tensors=with_adapters)

    def _beside(self, link: ProductLink, product: Kernel, *, first: bool) -> tuple[Kernel, ...]:
        """The adapter's kernels behind a product; ``first`` : of those that read the same input."""
        together = self._together(link)
        if self.adapter is None or link != together[-1]:
            return ()
        if target := self.targets[link.tensor]:
            product = replace(product, name=target.removeprefix("linear_"))
            link = msgspec.structs.replace(link, n_out=sum(one.n_out for one in together))
        return _adapter_kernels(link, product, self.adapter, first, self.wide)

    def _together(self, link: ProductLink) -> tuple[ProductLink, ...]:
        """The weights of the layer that share a weight's adapter, it among them."""
        target = self.targets[link.tensor]
        same = tuple(one for one in self.links.products if self.targets.get(one.tensor) == target)
        return same if target else (link,)

    def _with_tensors(self, tensors: tuple[Tensor, ...], adapted: Collection[str]) -> tuple[Tensor, ...]:
        """The tensors, each that has an adapter followed by its two, and each that is saved followed by what it was,
        which PEFT keeps (peft/utils/other.py, ``ModulesToSaveWrapper``)."""
        listed: list[Tensor] = []
        for tensor in tensors:
            listed.append(tensor)
            if self.adapter is not None and not tensor.frozen and not tensor.tied_to:
                module, _, own = tensor.name.rpartition(".")
                original = f"{module}.original_module.{own}"
                listed.append(replace(tensor, name=original, frozen=True, element=self.element))
            if self.adapter is not None and tensor.name in adapted:
                link = next(link for link in self.links.products if link.tensor == tensor.name)
                together = self._together(link)
                if link != together[-1]:
                    continue
                rank = self.adapter.rank
                n_out = sum(one.n_out for one in together)
                module = tensor.name.removesuffix(".weight")
                if target := self.targets[tensor.name]:
                    module = f"{module.rpartition('.')[0]}.{target}"
                _, first, second, _ = _CUTS.get(tensor.cut, ("whole",) * 4)
                listed.append(Tensor(f"{module}.lora_A.weight", rank * link.n_in, cut=first, width=link.n_in))
                listed.append(Tensor(f"{module}.lora_B.weight", rank * n_out, cut=second, width=rank))
        return tuple(listed)


_CUTS = {
    "column": ("whole", "column", "column", "heads"),
    "row": ("heads", "row", "column", "sequence"),
}
"""How tensor parallelism cuts an adapter beside a product that it cuts so: what comes ahead of its products, these two,
and what comes behind (Megatron-Bridge peft/utils.py, ``ParallelLinearAdapter``)."""


def _adapter_kernels(
    link: ProductLink, product: Kernel, adapter: Adapter, first: bool, wide: bool
) -> tuple[Kernel, ...]:
    """Dropout and casts of the input, two products of the rank, the scaling and the sum (peft/tuners/lora/layer.py,
    ``forward``; bnb.py casts nothing under autocast).

    One input is kept for all adapters that read it, unless each drops or casts its own.
    """
    rows = product.flops / (2.0 * product.n * product.k)
    name = product.name
    cuts = _CUTS.get(product.cut, ("sequence",) * 4)
    casts = wide and not adapter.load_in_4bit
    kept_input = rows * link.n_in if first or casts or adapter.dropout else 0.0
    listed: list[Kernel] = []
    if casts:
        listed.append(_passes(f"{name}{ADAPTER}cast", rows * link.n_in, 6.0, 6.0, (2, 2), cuts[0]))
    if adapter.dropout:
        mask = rows * link.n_in
        dropped = _passes(f"{name}{ADAPTER}dropout", mask, 2.25, 2.25, (1, 1), cuts[0])
        listed.append(replace(dropped, saved=mask / 2.0, kept=(mask, mask, mask)))
    listed += [
        replace(_product(f"{name}{ADAPTER}A", product, rows, (link.n_in, adapter.rank), kept_input), cut=cuts[1]),
        replace(
            _product(f"{name}{ADAPTER}B", product, rows, (adapter.rank, link.n_out), rows * adapter.rank), cut=cuts[2]
        ),
        _passes(f"{name}{ADAPTER}scale", rows * link.n_out, 2.0, 2.0, (1, 1), cuts[3]),
        _passes(f"{name}{ADAPTER}sum", rows * link.n_out, 3.0, 3.0 * link.n_in / link.n_out, (1, 1), cuts[3]),
    ]
    return tuple(listed)


def _product(name: str, of: Kernel, rows: float, sizes: tuple[int, int], kept: float) -> Kernel:
    """A product of ``rows`` a sample with weights of ``sizes`` (in, out) that keeps so many elements; under autocast it
    keeps a cast of its own."""
    n_in, n_out = sizes
    flops = 2.0 * rows * n_in * n_out
    moved = rows * (n_in + n_out)
    return Kernel(
        name,
        "gemm",
        m=of.m,
        n=n_out,
        k=n_in,
        flops=flops,
        backward_flops=2.0 * flops,
        nbytes=moved,
        backward_nbytes=2.0 * moved,
        saved=kept,
        kept=(2.0 * kept, 2.0 * rows * n_in, 4.0 * kept),
        working=(2.0 * moved, 2.0 * moved, 4.0 * moved),
    )


def _passes(
    name: str, elements: float, ahead: float, back: float, launches: tuple[int, int], cut: str = "sequence"
) -> Kernel:
    """A bandwidth-bound op of so many passes over ``elements`` a sample that keeps nothing."""
    return Kernel(
        name,
        "memory",
        nbytes=ahead * elements,
        backward_nbytes=back * elements,
        launches=launches[0],
        backward_launches=launches[1],
        cut=cut,
        kept=(0.0, 0.0, 0.0),
    )


def _refuse_tied(model: Model, trained: Trained) -> None:
    """Raise for a head that is trained apart from the embedding whose weights it has."""
    saved = trained.adapter.modules_to_save if trained.adapter else ()
    for tensor in (tensor for layer in model.layers for tensor in layer.tensors if tensor.tied_to):
        for names in (saved, trained.frozen):
            if _matches(tensor.name, names, ends=names is saved) != _matches(
                tensor.tied_to, names, ends=names is saved
            ):
                raise ModelError(
                    f"{model.name}: {tensor.name} has the weights of {tensor.tied_to}; name both or neither of them"
                )


def _matches(name: str, patterns: Sequence[str], *, ends: bool = False) -> bool:
    """Whether a parameter's name is one of the patterns, or in a module of such a name; ``ends`` : of a module whose
    name ends so, as PEFT reads its lists."""
    module = name.rpartition(".")[0]
    if ends:
        return any(f".{module}.".find(f".{pattern}.") >= 0 for pattern in patterns)
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def _frozen_names(model: Model, trained: Trained) -> frozenset[str]:
    """Names of tensors that are not trained. Raises for a pattern that names none."""
    names = [tensor.name for layer in model.layers for tensor in layer.tensors]
    adapter = trained.adapter
    patterns = adapter.modules_to_save if adapter else trained.frozen
    for pattern in patterns:
        if not any(_matches(name, (pattern,), ends=adapter is not None) for name in names):
            # Blocks are alike: one stands for all.
            modules = {re.sub(r"\.\d+(?=\.|$)", ".0", name.rpartition(".")[0]) for name in names} - {""}
            field = "modules_to_save" if adapter else "frozen"
            raise ModelError(f"{model.name}: no parameter is in {pattern!r} of {field}; {nearest(pattern, modules)}")
    if adapter is not None:
        return frozenset(name for name in names if not _matches(name, patterns, ends=True))
    return frozenset(name for name in names if _matches(name, patterns))


def _targets(model: Model, links: Sequence[LayerLinks], adapter: Adapter) -> dict[str, str]:
    """Names of the weights that have an adapter -> Megatron's name of the linear that shares one; empty for one of its
    own. Raises for a target that is no linear of the model."""
    linears = {link.tensor: link for layer in links for link in layer.products}
    modules = {name.removesuffix(".weight"): name for name in linears}
    heads = {tensor.name for layer in model.layers for tensor in layer.tensors if layer.kind == "head"}
    ends = sorted({module.rpartition(".")[2] for module in modules})
    targets: dict[str, str] = {}
    for target in adapter.target_modules:
        if target in MEGATRON_LINEARS:
            named = _of_megatron(model, links, target)
        elif target == ALL_LINEAR:
            named = {name for name in linears if name not in heads}
        elif is_pattern(target):
            pattern = compiled(target)
            named = {name for module, name in modules.items() if pattern.fullmatch(module)}
        else:
            named = {name for module, name in modules.items() if module == target or module.endswith(f".{target}")}
        if not named:
            experts = any(f".{target}." in f".{tensor.name}." for layer in model.layers for tensor in layer.tensors)
            why = (
                "is no plain linear; adapters of experts and embeddings are not played"
                if experts
                else "names no linear"
            )
            wrong = f"{model.name}: target_modules: {target!r} {why}; {nearest(target, ends)}"
            raise ModelError(wrong) if experts else UnknownTarget(wrong, target)
        if twice := sorted(named & targets.keys()) if target in MEGATRON_LINEARS or any(targets.values()) else []:
            raise ModelError(f"{model.name}: target_modules: {target!r} names {twice[0]} once more; leave one name out")
        targets |= dict.fromkeys(named, target if target in MEGATRON_LINEARS else "")
    return targets


def _of_megatron(model: Model, links: Sequence[LayerLinks], target: str) -> set[str]:
    """Names of the weights that a linear of Megatron's is. Raises where it is experts', too."""
    kernels = [kernel for layer in model.layers for kernel in layer.kernels]
    if target.startswith("linear_fc") and any(kernel.cut.startswith("expert") for kernel in kernels):
        raise ModelError(
            f"{model.name}: target_modules: {target!r} has adapters beside experts, too, which are not played; name "
            "linear_qkv and linear_proj alone"
        )
    names = MEGATRON_LINEARS[target]
    pairs = zip(model.layers, links, strict=True)
    return {
        link.tensor for layer, own in pairs for link in own.products if layer.kernels[link.kernels[0]].name in names
    }


def _marked(layer: Layer, links: LayerLinks, frozen: Collection[str], trained: Trained) -> tuple[Tensor, ...]:
    """A layer's tensors, those that are not trained marked, with the bytes that they are kept in."""
    adapter = trained.adapter
    packed = adapter is not None and adapter.load_in_4bit and layer.kind not in {"head", "embedding"}
    if packed and any(tensor.cut.startswith("expert") for tensor in layer.tensors):
        raise ModelError(f"{layer.name}: load_in_4bit of experts is not played; leave it out")
    linears = {link.tensor for link in links.products}

    def marked(tensor: Tensor) -> Tensor:
        """The tensor, frozen unless it is trained."""
        if tensor.name not in frozen and tensor.tied_to not in frozen:
            return tensor
        small = adapter.packed_bytes if adapter is not None and packed and tensor.name in linears else 0.0
        return replace(tensor, frozen=True, element=small or trained.element)

    return tuple(map(marked, layer.tensors))
