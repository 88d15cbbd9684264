"""The list of items of one pass through a layer, while nodes write it."""

from __future__ import annotations

import msgspec

from clustersim.model import Kernel
from clustersim.partition.base import Exchange, Item, Work


def has_weights(kernel: Kernel) -> bool:
    """Whether the kernel is a product with weights, whose backward has a part of its own for them (W)."""
    return kernel.kind in {"gemm", "conv"} and not kernel.batch


class Listing:
    """Items in the order a rank issues them.

    Work waits for the exchanges it was told of, and what no exchange parts is one Work. ``waiting`` are the exchanges
    on the way of the data: the next work (but weight gradients, which are beside that way) needs them.
    """

    def __init__(self, items: tuple[Item, ...] = (), waiting: tuple[int, ...] = ()) -> None:
        self.items: list[Item] = list(items)
        self.waiting = waiting

    def work(self, name: str, kernels: tuple[Kernel, ...], part: str, needs: tuple[int, ...] = ()) -> None:
        """Kernels of a pass in order of forward; backward runs them in reverse, and W only products with weights."""
        if part in "IW":
            kernels = tuple(k for k in reversed(kernels) if part == "I" or has_weights(k))
        if not kernels:
            return
        if part != "W":
            needs, self.waiting = tuple(sorted({*needs, *self.waiting})), ()
        for i in range(len(self.items) - 1, -1, -1):
            item = self.items[i]
            if isinstance(item, Exchange):
                break
            # Earlier work of the same pass, with nothing waited for since: a rank's kernels run one after the other, so
            # it is one piece of work, unless the new one waits for more. Only weight gradients may change places with
            # others: nothing of the layer waits for them.
            if item.part != part and (item.needs or "W" not in {item.part, part}):
                break
            if item.part == part and set(needs) <= set(item.needs):
                names = item.name if name in item.name.split("+") else f"{item.name}+{name}"
                self.items[i] = Work(names, (*item.kernels, *kernels), part, item.needs)
                return
        self.items.append(Work(name, kernels, part, needs))

    def exchange(self, exchange: Exchange) -> None:
        """Append an exchange on the way of the data: it waits for what is waited for, and the next work for it."""
        needs = tuple(sorted({*exchange.needs, *self.waiting}))
        self.waiting = (self.beside(msgspec.structs.replace(exchange, needs=needs)),)

    def beside(self, exchange: Exchange) -> int:
        """Append an exchange beside that way, which has only the needs it says, and return its index."""
        self.items.append(exchange)
        return len(self.items) - 1

    def wait_for(self, *exchanges: int) -> None:
        """The next work needs these too."""
        self.waiting = (*self.waiting, *exchanges)
