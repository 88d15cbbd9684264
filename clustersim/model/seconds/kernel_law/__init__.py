"""Kernels of any GPU from its spec sheet: one law a kind of kernel, with few constants, for all generations.

Laws give the time of an isolated kernel in a short burst. A training step is slower, at its power limit and on other
clocks: one sustained factor a device stands between (:mod:`clustersim.model.seconds.gemm`).

Constants are fitted by ``tests/kernel_fit.py`` on 355,000 measured kernels of A100, H100, B200, GB200 and RTX PRO 6000,
and judged with each GPU left out.
"""

from clustersim.model.seconds.kernel_law.constants import kernel_laws
from clustersim.model.seconds.kernel_law.sheet import sheet_of

__all__ = ["kernel_laws", "sheet_of"]
