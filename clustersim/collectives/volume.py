"""How many bytes a member of a collective sends and receives: the algorithms' known volumes, in closed form."""

from __future__ import annotations


def per_member(kind: str, n: int, algorithm: str = "ring", n_islands: int = 1) -> tuple[float, float]:
    """(sent, received): bytes per byte of NCCL's S, mean over the ``n`` members of one group.

    Parameters
    ----------
    kind : one of :data:`clustersim.program.COLLECTIVES`. algorithm : that played it; of one that is not known the
        least any can do is told, which is also what nccl-tests' bus bandwidth counts.
    n_islands : NVLink domains the members are in; only ``nvls_tree`` asks.

    All that is sent is received, but for switches that add and multicast (NVLS), which take part themselves.

    >>> per_member("all_reduce", 8), per_member("all_reduce", 8, "ring_unsplit")  # 2 (n-1)/n and n - 1
    ((1.75, 1.75), (7.0, 7.0))
    >>> per_member("reduce_scatter", 8, "nvls")  # everything goes to the switch, a part comes back
    (1.0, 0.125)
    """
    if algorithm in {"nvls", "nvls_tree"}:
        return _in_switch(kind, n, n_islands)
    if kind == "all_reduce":
        each = float(n - 1) if algorithm in {"direct", "ring_unsplit"} else 2.0 * (n - 1) / n
    elif kind in {"all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"}:
        each = (n - 1) / n
        if algorithm == "halving_doubling" and kind in {"all_gather", "reduce_scatter"}:
            each += (n - 2 ** (n.bit_length() - 1)) / n**2  # members beyond a power of two fold in, or are told
    elif kind in {"scatter", "gather"}:  # all but its own part leaves, or reaches, the root alone
        each = (n - 1) / n**2
    elif kind == "sendrecv":
        each = 1.0
    else:
        each = 0.0
    return each, each


def _in_switch(kind: str, n: int, n_islands: int) -> tuple[float, float]:
    """NVLink SHARP: each of an island's p members is the head of S/p (see :mod:`clustersim.collectives.nvls`)."""
    part = n_islands / n
    between = 2.0 * (n_islands - 1) / n  # heads exchange their parts over trees, up and down
    sent = {"all_reduce": 1.0 + part, "reduce_scatter": 1.0, "all_gather": part}[kind]
    received = {"all_reduce": 1.0 + part, "reduce_scatter": part, "all_gather": 1.0}[kind]
    return sent + between, received + between
