"""Which products of a layer multiply by which tensors, and what is left of its backward where some are frozen.

A product's weights are told by their sizes and their place: a layer lists its kernels and its tensors in the same order
as far as sizes are alike. Where nothing in front of a layer is trained, backward ends at the first kernel that is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import msgspec

from clustersim.core.errors import ModelError
from clustersim.core.model import Kernel, Layer, Tensor

Kernels = tuple[Kernel, ...]
Beside = Callable[..., Kernels]
"""``(link, product, first=) -> kernels`` that an adapter adds behind a product."""
NOTHING = (0.0, 0.0, 0.0)


class ProductLink(msgspec.Struct, frozen=True):
    """A weight and the products that multiply by it: ``n_in`` to ``n_out`` elements a token.

    kernels : indices in the layer; two where the products of one tensor are described apart (gate and up in one).
    """

    tensor: str
    kernels: tuple[int, ...]
    n_in: int
    n_out: int


class LayerLinks(msgspec.Struct, frozen=True):
    """Of one layer: plain products with their weights, and indices of products whose weights cannot be told apart:
    those of ``experts``, and ``others``."""

    products: tuple[ProductLink, ...]
    experts: tuple[int, ...]
    others: tuple[int, ...]

    def of(self, kernel: int) -> ProductLink | None:
        """The weight of a kernel, where one is known."""
        return next((link for link in self.products if kernel in link.kernels), None)


def linked(layer: Layer) -> LayerLinks:
    """Which weight each product of a layer multiplies by."""
    weights = [tensor for tensor in layer.tensors if tensor.rows > 1 and tensor.width > 1]
    links: list[ProductLink] = []
    experts: list[int] = []
    others: list[int] = []
    pending: dict[tuple[int, int], int] = {}
    for i, kernel in enumerate(layer.kernels):
        if kernel.kind in {"conv", "recurrent"}:
            others.append(i)
        if kernel.kind != "gemm" or kernel.batch:
            continue
        if kernel.cut.startswith("expert"):
            experts.append(i)
            continue
        size = kernel.n, kernel.k
        if size in pending:
            place = pending.pop(size)
            links[place] = msgspec.structs.replace(links[place], kernels=(*links[place].kernels, i))
            continue
        tensor = _weight_of(kernel, weights)
        if tensor is None:
            others.append(i)
            continue
        weights.remove(tensor)
        wide = tensor.numel // kernel.k
        if wide != kernel.n:
            pending[size] = len(links)
        links.append(ProductLink(tensor.name, (i,), kernel.k, wide))
    return LayerLinks(tuple(links), tuple(experts), tuple(others))


def _weight_of(kernel: Kernel, weights: Sequence[Tensor]) -> Tensor | None:
    """The first weight of a product's sizes that is cut as it is; else one that is twice as wide, which two products
    share; else either of another cut."""
    alike = [
        tensor
        for times in (1, 2)
        for tensor in weights
        if (tensor.rows, tensor.width) in {(times * kernel.n, kernel.k), (kernel.k, times * kernel.n)}
    ]
    return next((tensor for tensor in alike if tensor.cut == kernel.cut), alike[0] if alike else None)


def rewritten(
    layer: Layer, links: LayerLinks, tensors: Sequence[Tensor], *, reached: bool, adapted: Collection[str], add: Beside
) -> Kernels:
    """The layer's kernels with the backward that its frozen ``tensors`` leave, and what ``add`` puts behind products
    whose weights are ``adapted``; ``reached`` : something before the layer is trained, so that gradients pass it.

    Raises :class:`ModelError` for products of which only a part is frozen and nobody can tell which.
    """
    packed = frozenset(t.name for t in tensors if t.quantised)
    work = _Rewriter(layer, links, {t.name for t in tensors if t.frozen}, packed, frozenset(adapted), add)
    work.check(tensors, reached=reached)
    if not work.frozen:
        return layer.kernels
    if not reached and not adapted and all(tensor.frozen for tensor in tensors):
        return tuple(_without_backward(kernel) for kernel in layer.kernels)
    return tuple(work.kernels(tensors, reached=reached))


class _RestFrozen(msgspec.Struct, frozen=True):
    """Whether tensors are frozen that no one product has: of experts, of ``others``, and vectors (norms, biases)."""

    experts: bool
    others: bool
    vectors: bool


class _Rewriter(msgspec.Struct, frozen=True):
    """What :func:`rewritten` is about; ``packed`` : the frozen weights that are kept in 4 bits."""

    layer: Layer
    links: LayerLinks
    frozen: Collection[str]
    packed: frozenset[str]
    adapted: frozenset[str]
    add: Beside

    def check(self, tensors: Sequence[Tensor], *, reached: bool) -> None:
        """Raise for what cannot be said of this layer."""
        untold = {"experts": self.links.experts, "others": self.links.others}
        of_products = {link.tensor for link in self.links.products}
        rest = [t for t in tensors if t.name not in of_products and t.width > 1]
        groups = {
            "experts": [t for t in rest if t.cut.startswith("expert")],
            "others": [t for t in rest if not t.cut.startswith("expert")],
        }
        for kind, kernels in untold.items():
            some = {tensor.frozen for tensor in groups[kind]}
            if kernels and len(some) > 1:
                names = ", ".join(tensor.name for tensor in groups[kind] if tensor.frozen)
                raise ModelError(f"{self.layer.name}: {names} cannot be frozen alone; freeze the whole layer or none")
        convolved = any(self.layer.kernels[i].kind in {"conv", "recurrent"} for i in self.links.others)
        if convolved and self.frozen and (reached or self.adapted or len(self.frozen) < len(tensors)):
            raise ModelError(
                f"{self.layer.name}: a frozen convolution or recurrence behind or beside something trained is not "
                "played; freeze whole layers from the first on"
            )

    def kernels(self, tensors: Sequence[Tensor], *, reached: bool) -> Iterator[Kernel]:
        """One after the other. What reads the same input as the first trained product needs no gradient of it."""
        rest = _RestFrozen(
            experts=any(t.frozen for t in tensors if t.cut.startswith("expert")),
            others=all(t.frozen for t in tensors if t.width > 1),
            vectors=all(t.frozen for t in tensors if t.width == 1),
        )
        begins = 0 if reached else self._first_trained(tensors)
        beside = range(0) if reached else range(begins, self._group_end(begins) + 1)
        sharing = self._sharing()
        given: set[int] = set()
        for i, kernel in enumerate(self._kept_elsewhere()):
            made = self._with_own_backward(i, kernel, rest, ahead=i < begins, beside=i in beside)
            yield made
            link = self.links.of(i)
            if link is not None and link.tensor in self.packed and made.saved:
                given.add(sharing[i])
            if link is None or link.tensor not in self.adapted or i != link.kernels[-1]:
                continue
            added = self.add(link, kernel, first=sharing[i] not in given)
            if added:
                given.add(sharing[i])
            yield from (_one_product(k, "W") if i in beside and k.name.endswith("lora_A") else k for k in added)

    def _with_own_backward(self, i: int, kernel: Kernel, rest: _RestFrozen, *, ahead: bool, beside: bool) -> Kernel:
        """A kernel with what is left of its backward; ``ahead`` : of the first that is trained, ``beside`` : it reads
        what that one reads."""
        link = self.links.of(i)
        if link is None and i not in {*self.links.experts, *self.links.others}:
            return _no_product(kernel, rest, ahead=ahead)
        is_frozen = link.tensor in self.frozen if link else rest.experts if i in self.links.experts else rest.others
        if not is_frozen:
            return _one_product(kernel, "W") if beside else kernel
        if ahead or beside:
            return _without_backward(kernel)
        # One in 4 bits keeps its input, though no weight's gradient asks for it (bitsandbytes, autograd/_functions.py,
        # MatMul4Bit: ctx.tensors = (A, B)).
        keeps = link is not None and link.tensor in self.packed
        return _one_product(kernel, "I") if keeps else _inputs_only(kernel)

    def _first_trained(self, tensors: Sequence[Tensor]) -> int:
        """The first kernel that trains something: of the layer's vectors, its norms; 0 where that is not told."""
        if any(not t.frozen for t in tensors if t.width == 1):
            return 0
        trained = {t.name for t in tensors if not t.frozen} | self.adapted
        places = [link.kernels[0] for link in self.links.products if link.tensor in trained]
        known = {link.tensor for link in self.links.products}
        return min(places) if places and all(t.frozen or t.name in known for t in tensors) else 0

    def _group_end(self, begins: int) -> int:
        """The last product that reads what the product at ``begins`` reads."""
        sharing = self._sharing()
        return max((i for i in sharing if sharing[i] == sharing.get(begins)), default=begins)

    def _sharing(self) -> dict[int, int]:
        """Product -> the first of those that read the same input, which keeps it."""
        keepers: dict[int, int] = {}
        shared: dict[int, int] = {}
        for i, kernel in enumerate(self.layer.kernels):
            if self.links.of(i) is None:
                continue
            if kernel.saved:
                keepers[kernel.k] = i
            shared[i] = keepers.setdefault(kernel.k, i)
        return shared

    def _kept_elsewhere(self) -> list[Kernel]:
        """The kernels; what a frozen product keeps no longer, the next trained one that reads it keeps, and an
        attention or a ReLU before it that needs its own output."""
        kernels = list(self.layer.kernels)
        sharing = self._sharing()
        for link in self.links.products:
            i = link.kernels[0]
            if link.tensor not in self.frozen or not kernels[i].saved:
                continue
            trained = [link.kernels[0] for link in self.links.products if link.tensor not in self.frozen]
            readers = [j for j in trained if sharing[j] == i]
            if readers:
                keeper = kernels[readers[0]]
                kernels[readers[0]] = replace(keeper, saved=kernels[i].saved, kept=kernels[i].kept)
                kernels[i] = replace(kernels[i], saved=0.0, kept=NOTHING)
                continue
            maker = next((j for j in reversed(range(i)) if _gives_away(kernels[j])), None)
            between = range(i if maker is None else maker + 1, i)
            if maker is not None and not any(kernels[j].kind == "gemm" for j in between):
                kernels[maker] = _keeping_more(kernels[maker], kernels[i])
                kernels[i] = replace(kernels[i], saved=0.0, kept=NOTHING)
        return kernels


def _no_product(kernel: Kernel, rest: _RestFrozen, *, ahead: bool) -> Kernel:
    """What is left of the backward of a kernel that multiplies by no matrix."""
    looked_up = kernel.name == "gather" and rest.vectors and rest.others
    if ahead or looked_up or (kernel.name == "bias_gradients" and rest.vectors):
        return _without_backward(kernel)
    return _norm_of_frozen(kernel) if rest.vectors and "norm" in kernel.name else kernel


def _gives_away(kernel: Kernel) -> bool:
    """Whether backward needs a kernel's output, which the product behind it usually keeps: fused attention, ReLU."""
    return kernel.kind == "attention" or (kernel.name.endswith("activation") and not kernel.saved)


def _keeping_more(kernel: Kernel, product: Kernel) -> Kernel:
    """A kernel that keeps what a product keeps, too."""
    if kernel.kept is None or product.kept is None:
        return replace(kernel, saved=kernel.saved + product.saved)
    half, autocast, full = (own + other for own, other in zip(kernel.kept, product.kept, strict=True))
    return replace(kernel, saved=kernel.saved + product.saved, kept=(half, autocast, full))


def _without_backward(kernel: Kernel) -> Kernel:
    """A kernel of forward alone."""
    return replace(
        kernel,
        backward_flops=0.0,
        backward_nbytes=0.0,
        backward_launches=0,
        halves="",
        saved=0.0,
        kept=NOTHING,
        working=NOTHING,
    )


def _inputs_only(kernel: Kernel) -> Kernel:
    """A product whose weights are frozen: one product in backward, and nothing to keep for the other."""
    return replace(_one_product(kernel, "I"), saved=0.0, kept=NOTHING)


def _one_product(kernel: Kernel, halves: str) -> Kernel:
    """A product of which backward has one of two: ``I``, of its inputs, or ``W``, of its weights."""
    return replace(
        kernel,
        backward_flops=kernel.backward_flops / 2.0,
        backward_nbytes=kernel.backward_nbytes / 2.0,
        backward_launches=kernel.backward_launches // 2,
        halves=halves,
    )


def _norm_of_frozen(kernel: Kernel) -> Kernel:
    """A norm whose weight is frozen. Written out, an RMSNorm keeps no scaled input for the weight's gradient and has
    none of its product and sum; of one kernel backward reads its input once less, and sums nothing."""
    if kernel.backward_launches > 2:
        elements = kernel.nbytes / 18.0
        copied = 0.0 if kernel.kept is None else 4.0 * kernel.kept[0] / 6.0
        return replace(
            kernel,
            backward_nbytes=kernel.backward_nbytes - 4.0 * elements,
            backward_launches=kernel.backward_launches - 2,
            saved=2.0 * kernel.saved / 3.0,
            kept=None if kernel.kept is None else (copied, copied, copied),
        )
    return replace(kernel, backward_nbytes=0.6 * kernel.backward_nbytes, backward_launches=1)
