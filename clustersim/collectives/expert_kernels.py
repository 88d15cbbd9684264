"""What the kernels of DeepEP and its kin take for a dispatch or a combine, in place of NCCL's sends and receives.

DeepEP's few SMs copy each token once for every rank, or node, that wants it (deepseek-ai/DeepEP csrc/kernels/
{intranode,internode}.cu):

    ``start + max(wire, tokens (token + copies (copy + row / rate)) / sms)``

with the SMs that the kernels are given, or, between nodes, a message for each token and node. GPUs post those by
themselves (IBGDA) on InfiniBand and RoCE; where they cannot, a thread of the host does, one message after the other.

HybridEP writes each copy where it belongs over NVLink (branch hybrid-ep), and all ranks wait for each other at the end:

    ``start + doubling log2(ranks) + max(links wire, copies (copy + row / rate) / sms)``
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from clustersim.core.collective_kinds import DTYPE_BYTES, ExchangeKernel
from clustersim.core.transports import FAST_NIC


class KernelConstants(msgspec.Struct, frozen=True):
    """Of one kind of kernel.

    Parameters
    ----------
    start : [s] on one node. far_start, per_node : [s] between nodes, and for each node. token, copy : [s] of one SM for
        a token, and for each of its copies. rate : [bytes/s] that one SM copies.
    """

    start: float
    far_start: float
    per_node: float
    token: float
    copy: float
    rate: float


class OneSided(msgspec.Struct, frozen=True):
    """Of one kind of kernel that writes into its peers' memory over NVLink.

    Parameters
    ----------
    start, doubling : [s], and what each doubling of the ranks adds. links : its bytes' time, over that of NCCL's sends
        without the copy of a member's own part. copy, rate : [s] of one SM for a copy of a token, and [bytes/s] of it.
    """

    start: float
    doubling: float
    links: float
    copy: float
    rate: float


CONSTANTS: Mapping[str, KernelConstants] = MappingProxyType(
    {
        "dispatch": KernelConstants(31.6e-6, 45e-6, 9e-6, 451e-9, 85e-9, 28.1e9),
        "combine": KernelConstants(42.1e-6, 70e-6, 9e-6, 890e-9, 0.0, 25.8e9),
    }
)
"""Least squares of the logarithms over DeepEP's normal kernels on H100, B200 and GB200 (github.com/ai-dynamo/
aiconfigurator, 4 to 24 SMs, 1 to 131,072 tokens): each GPU is 8 to 21 % off when the others are fitted, 10.6 % in the
median."""
HYBRIDEP: Mapping[str, OneSided] = MappingProxyType(
    {
        "dispatch": OneSided(11.7e-6, 1.8e-6, 1.08, 45e-9, 58e9),
        "combine": OneSided(11.4e-6, 3.7e-6, 1.19, 140e-9, 122e9),
    }
)
"""Starts are those of TensorRT-LLM's one-sided all-to-all on 2 to 32 GB200 of a rack (github.com/ai-dynamo/
aiconfigurator, 1 to 65,536 tokens), which has all SMs and moves 655 to 673 GB/s of the links' 900, on two ranks as on a
rack: any number of ranks is 2 to 12 % off, in the median, when the others are fitted. What it takes a token, 10 ns, is
left out, since it binds on two ranks in 4 bits alone. ``links`` is HybridEP's own on 16 SMs, as its authors measured it
on 8 to 36 ranks (deepseek-ai/DeepEP docs/README_Hybrid-EP.md): GB200 is within 7 % with it, and B200, left out, 5 %.
What an SM takes is HybridEP's on 4 and 8 of eight H100s, of rows of 2 to 14 KB (NVIDIA-NeMo/Automodel docs/
deepep_vs_hybridep_benchmark.md): 4 SMs of its authors' H100s on two to eight nodes, left out, go from 26 to 18 % too
fast. From 16 SMs on it binds nowhere."""
LINKS = 1.15
"""Their bytes' time on NVLink, over that of NCCL's sends: 153 to 158 GB/s of an H800's 200 (DeepEP's README)."""
POSTED: Mapping[tuple[str, str], float] = MappingProxyType({("deepep", "efa"): 0.55e-6, ("uccl", "efa"): 2.0e-6})
"""Seconds of a rank for a message that a thread of the host posts, by library and transport: NVSHMEM's and UCCL's
proxies over EFA (awslabs/awsome-distributed-ai, Qwen3-30B-A3B on p5). From 512 to 2,048 tokens a rank and from two
nodes to four, steps by UCCL are as much longer than those by NCCL's all_to_all whether the host's calls or kernels
bind, so that calls hide nothing of them (:func:`posted_by_host`): its five steps in 16 bits ask for 1.8 to 2.2 us.
Those by NVSHMEM ask for 0.6 to 1 us on four nodes and for next to nothing on two: there they are 11 to 27 % too slow,
and on four 23 % too fast to right.

They are of NICs of 100 Gb/s. On those of 200 and 400 (p5en, p6-b200) 16 and 32 ranks dispatch 4,096 tokens of 7,168
elements in 1.1 to 2.1 ms in 8 bits, and exchange them in 2 to 4 ms in 16 (uccl-project/uccl ep/README.md; UCCL and
NVSHMEM alike in awslabs/awsome-distributed-ai): no more than 0.2 us a message, and what the wire takes."""


def posting(library: str, net: str, nic_rate: float) -> float:
    """Seconds of a rank for a library's message to another node; 0 where GPUs post them by themselves, or a thread of
    the host as fast as the wire takes them. ``nic_rate`` : [bytes/s] of a NIC, as its driver reports it.

    >>> posting("uccl", "efa", 12.5e9), posting("uccl", "efa", 50e9), posting("uccl", "ib", 12.5e9)
    (2e-06, 0.0, 0.0)
    """
    return POSTED.get((library, net), 0.0) if nic_rate < FAST_NIC else 0.0


def posted_by_host(net: str, nic_rate: float) -> frozenset[str]:
    """Libraries whose messages a thread of the host posts over a transport, one after the other.

    >>> sorted(posted_by_host("efa", 12.5e9)), sorted(posted_by_host("ib", 50e9))
    (['deepep', 'uccl'], [])
    """
    return frozenset(library for library, _ in POSTED if posting(library, net, nic_rate))


def one_sided(kernel: ExchangeKernel | None) -> bool:
    """Whether a kernel writes into its peers' memory, with all that NVLink lets through.

    >>> one_sided(ExchangeKernel("hybridep", "dispatch", 7168.0, 5.3, 16))
    True
    """
    return kernel is not None and kernel.library == "hybridep"


def kernel_time(
    kernel: ExchangeKernel, nbytes: float, dtype: str, ranks: int, islands: int, post: float = 0.0
) -> Callable[[float], float]:
    """Seconds of a dispatch or combine whose bytes take ``wire`` seconds on the links.

    Parameters
    ----------
    nbytes : [bytes] that a rank sends, its own copies included. dtype : of the elements. ranks : of the group.
    islands : NVLink domains that the group spans. post : [s] of a message between them (:func:`posting`).
    """
    constants = CONSTANTS[kernel.phase]
    row = kernel.row * DTYPE_BYTES[dtype]
    copies = nbytes / row
    if one_sided(kernel) and not kernel.far:
        of_phase = HYBRIDEP[kernel.phase]
        begin = of_phase.start + of_phase.doubling * math.log2(max(1.0, ranks / islands))
        busy = copies * (of_phase.copy + row / of_phase.rate) / kernel.sms if kernel.sms else 0.0
        return lambda wire: begin + max(of_phase.links * wire, busy)
    if kernel.far:
        start = constants.far_start + constants.per_node * islands
        return lambda wire: start + max(wire, copies * post)
    tokens = copies / kernel.copies
    least = (tokens * constants.token + copies * (constants.copy + row / constants.rate)) / kernel.sms
    return lambda wire: constants.start + max(LINKS * wire, least)
