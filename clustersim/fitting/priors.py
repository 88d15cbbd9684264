"""What is known of NCCL's constants before any table is read, and how far machines differ from each other.

Values are documented: NCCL's tuner (src/graph/tuning.cc of 2.28: hops of 0.6/1.9/3.4 us over NVLink, 1.0/2.5/5.7 over
PCIe, 2.7/4.0/14 over the network in a ring, 5/8.5/14 in a tree), line rates and a protocol's payload (LL half, LL128
120 of 128 bytes), NVLink SHARP's S (1 + 1/p), the plug-ins' own figures (:mod:`clustersim.transports`), and for the
host the usual 10 to 15 us of a launch that is waited for. Published tables then move them a little
(:mod:`clustersim.calibration.fit.learn`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

US = 1e-6


class Prior(msgspec.Struct, frozen=True):
    """A constant before any measurement.

    Parameters
    ----------
    value : in SI units. spread : standard deviation of ln(constant) between machines.
    """

    value: float
    spread: float


def _by_protocol(name: str, values: tuple[float, ...], spread: float, unit: float = 1.0) -> dict[str, Prior]:
    return {
        f"{name}/{protocol}": Prior(value * unit, spread)
        for protocol, value in zip(("LL", "LL128", "Simple"), values, strict=True)
    }


_OLDER = (1.3, 1.5, 1.8)
"""Hops of generations before Hopper against Hopper's: slower clocks, and no asynchronous barriers for Simple."""

PRIORS: Mapping[str, Prior] = {
    **_by_protocol("hop.nvlink", (0.8, 1.9, 3.4), 0.4, US),
    "hop.pcie/LL": Prior(1.5 * US, 0.6),
    "hop.pcie/LL128": Prior(2.5 * US, 0.6),
    "hop.pcie/Simple": Prior(5.7 * US, 0.3),
    **_by_protocol("hop.net", (3.5, 5.0, 14.0), 0.4, US),
    **{
        name: prior
        for age in ("pascal", "volta", "ampere")
        for name, prior in _by_protocol(f"hop_generation.{age}", _OLDER, 0.4).items()
    },
    **_by_protocol("hop_generation.blackwell", (1.3, 1.3, 1.3), 0.4),
    "net_extra.slingshot": Prior(1.0 * US, 0.8),
    "net_extra.efa": Prior(15.0 * US, 0.6),
    "net_extra.efa_sendrecv": Prior(20.0 * US, 0.6),
    "net_extra.efa_host": Prior(35.0 * US, 0.6),
    "net_extra.tcpx": Prior(30.0 * US, 0.6),
    "net_extra.tcpxo": Prior(25.0 * US, 0.6),
    "net_extra.tcp": Prior(25.0 * US, 0.7),
    "net_extra.opa": Prior(2.0 * US, 0.7),
    "net_extra.ib_host": Prior(2.0 * US, 0.7),
    "empty_steps": Prior(0.25, 0.3),
    "simple_ring_net": Prior(0.5, 0.5),
    "rooted_overlap.LL": Prior(0.5, 0.5),
    "rooted_overlap.LL128": Prior(0.5, 0.3),
    "rooted_overlap.Simple": Prior(0.7, 0.5),
    **_by_protocol("share.nvlink", (0.35, 0.74, 0.80), 0.1),
    **_by_protocol("share.pcie", (0.35, 0.70, 0.76), 0.15),
    **_by_protocol("share.shm", (0.35, 0.50, 0.50), 0.3),
    "share.net/LL": Prior(0.3, 0.3),
    "share.net/LL128": Prior(0.94, 0.06),
    **{f"share_generation.{age}": Prior(1.0, 0.04) for age in ("pascal", "volta", "ampere", "hopper", "blackwell")},
    "net_share.ib": Prior(0.96, 0.04),
    "net_share.roce": Prior(0.95, 0.06),
    "net_share.opa": Prior(0.9, 0.1),
    "net_share.ib_host": Prior(0.96, 0.04),
    "net_share.slingshot": Prior(0.9, 0.1),
    "net_share.efa": Prior(0.9, 0.1),
    "net_share.efa_sendrecv": Prior(0.88, 0.1),
    "net_share.efa_host": Prior(0.75, 0.2),
    "net_share.tcpx": Prior(0.85, 0.15),
    "net_share.tcpxo": Prior(0.9, 0.1),
    "net_share.tcp": Prior(0.9, 0.3),
    "rendezvous.slingshot": Prior(60.0 * US, 0.7),
    "tree_share": Prior(0.85, 0.2),
    "nvls_share.hopper": Prior(0.7, 0.07),
    "nvls_share.blackwell": Prior(0.65, 0.1),
    "nvls_tree_share": Prior(0.92, 0.05),
    "tree_levels": Prior(1.3, 0.25),
    "nvls_latency": Prior(25.0 * US, 0.3),
    "nvls_tree_hop": Prior(20.0 * US, 0.3),
    "p2p_share": Prior(0.77, 0.1),
    "p2p_net_share": Prior(0.92, 0.07),
    "send_share": Prior(0.8, 0.07),
    "p2p_channel_rate.ampere": Prior(13.9e9, 0.4),
    "p2p_channel_rate.hopper": Prior(82e9, 0.4),
    "p2p_channel_bytes.ampere": Prior(2.2 * 2**20, 0.5),
    "p2p_channel_bytes.hopper": Prior(66.0 * 2**20, 0.5),
    # Kernels of small sends in a published profile (8 V100) take 7 to 10 us, hops included: logs of whole calls cannot
    # tell it from the host.
    "base": Prior(3.6 * US, 0.05),
    "rooted_base": Prior(5.0 * US, 0.5),
    "host_floor.intel": Prior(13.0 * US, 0.4),
    "host_floor.amd": Prior(13.0 * US, 0.4),
    "host_floor.power": Prior(15.0 * US, 0.4),
    "host_floor.arm": Prior(11.0 * US, 0.4),
    "host_single": Prior(10.0 * US, 0.3),
    "host_floor_per_gpu": Prior(3.2 * US, 0.3),
    # A work of 512 bytes, or a batch of 16 among the kernel's arguments.
    "host_block.queue": Prior(0.2 * US, 0.5),
    "host_block.arguments": Prior(0.05 * US, 0.5),
    "host_p2p_factor": Prior(2.0, 0.4),
    "host_p2p": Prior(12.0 * US, 0.4),
    "host_p2p_peer": Prior(2.5 * US, 0.4),
    "threads_base": Prior(8.0 * US, 0.5),
    "threads_step": Prior(2.0 * US, 0.5),
    "fill_norm": Prior(0.75, 0.12),
    "fill_span": Prior(30.0, 0.5),
}
"""Constants that measurements may move, by flat name."""


class Factor(msgspec.Struct, frozen=True):
    """What one machine has more or less of than its kind, all at once.

    Parameters
    ----------
    heads : beginnings of the flat names it multiplies. spread : standard deviation of its logarithm between machines.
    """

    heads: tuple[str, ...]
    spread: float

    def moves(self, name: str) -> bool:
        """Whether it multiplies a constant."""
        return any(name == head or name.startswith((head + ".", head + "/")) for head in self.heads)


FACTORS: Mapping[str, Factor] = {
    "host": Factor(
        ("base", "rooted_base", "host_floor", "host_single", "host_floor_per_gpu", "host_block", "host_p2p",
         "host_p2p_peer", "threads_base"), 0.5
    ),
    "hops": Factor(("hop.nvlink", "hop.pcie", "nvls_latency", "threads_step"), 0.3),
    "network hops": Factor(("hop.net", "net_extra", "nvls_tree_hop", "rendezvous"), 0.3),
    "links": Factor(("share.nvlink", "share.pcie", "share.shm", "nvls_share", "p2p_share", "send_share"), 0.03),
    "network": Factor(("net_share",), 0.08),
}  # fmt: skip
"""A host, a generation of links or a network is faster as a whole; a single constant differs on top of that."""
