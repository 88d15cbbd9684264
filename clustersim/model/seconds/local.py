"""What one rank of a split model pays for its runs of kernels and for its share of the optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, field

from clustersim.core.model import Kernel, Tensor
from clustersim.model.seconds.base import Setting
from clustersim.model.seconds.host import HostLaw
from clustersim.model.seconds.optimizer import optimizer_time, step_traffic
from clustersim.model.seconds.price import Pass, cast_time, in_recipe, price, unpack_time

Runs = tuple[tuple[tuple[Kernel, ...], str], ...]
"""Kernels, and which part of each runs: see :func:`clustersim.model.seconds.price.price`."""


@dataclass(frozen=True, eq=False)
class LocalCost:
    """Prices in one setting, each asked for once.

    Parameters
    ----------
    where : device, dtypes and constants. micro_batch_size : samples of one pass. optimizer, optimizer_impl : as in
    :class:`clustersim.model.seconds.Execution`. state_bytes : of one element of a state.
    host : what calls take the host; None where it need not be asked (CUDA graphs, bounds).
    """

    where: Setting
    micro_batch_size: int
    optimizer: str | None
    optimizer_impl: str
    state_bytes: int
    host: HostLaw | None = None
    _known: dict[tuple[object, ...], tuple[Runs, Pass]] = field(default_factory=dict, init=False, repr=False)
    _alone: dict[tuple[int, str, bool], tuple[Kernel, float]] = field(default_factory=dict, init=False, repr=False)

    def in_recipe(self, kind: str) -> bool:
        """Whether linears of a layer of this ``kind`` run in 8 or 4 bits, where the setting says so."""
        return in_recipe(self.where, kind)

    def work(self, runs: Runs, *, dense: bool, cast: int = 0, packed: tuple[Tensor, ...] = ()) -> Pass:
        """Runs of kernels, back to back. ``dense`` : as in :func:`~clustersim.model.seconds.price.price`. ``cast`` :
        elements of fp32 weights that autocast copies. ``packed`` : quantised weights that are written out."""
        key = (*((id(kernels), part) for kernels, part in runs), dense, cast, packed)
        if key not in self._known:  # the runs are kept with the price, so that no other can take their place
            seconds = cast_time(self.where, cast) + unpack_time(self.where, packed)
            self._known[key] = runs, price(self.where, runs, self.micro_batch_size, dense=dense, more=seconds)
        return self._known[key][1]

    def kernel_seconds(self, kernel: Kernel, part: str, *, dense: bool) -> float:
        """Seconds of one kernel by itself, which a layer's host is asked ahead of, one by one."""
        key = id(kernel), part, dense
        if key not in self._alone:  # a tuple made for the question would be another one each time
            self._alone[key] = kernel, self.work((((kernel,), part),), dense=dense).seconds
        return self._alone[key][1]

    def update(self, numel: float, tensors: int) -> float:
        """Seconds of the optimizer step on so many elements in so many tensors."""
        return optimizer_time(self.where, numel, tensors, self.optimizer, self.optimizer_impl, self.state_bytes)

    def update_traffic(self, numel: float) -> float:
        """Bytes that a fused step on so many elements reads and writes, wherever it runs."""
        return step_traffic(numel, self.optimizer, "fused", self.state_bytes)
