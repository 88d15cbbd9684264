"""How many bytes a member of a collective sends and receives: the algorithms' known volumes, in closed form."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1024)
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
    if total := _in_rounds(kind, n, algorithm):
        return total / n, total / n
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


def _in_rounds(kind: str, n: int, algorithm: str) -> float:
    """What all members of :mod:`clustersim.collectives.exchanges` and ``trees`` send together, per byte of S and to or
    from member 0; 0 where that is what any algorithm sends. n = p + r, p = 2^k."""
    k = n.bit_length() - 1
    p, r = 1 << k, n - (1 << k)
    halved = p - 1 + (r + r / n)  # a pair's tensor is folded first, and its block told at the end
    subtrees = sum(min(v & -v, n - v) for v in range(1, n)) / n
    match algorithm, kind:
        case "recursive_doubling", "all_reduce":
            return float(k * p + 2 * r)
        case "recursive_doubling", "reduce_scatter":
            return halved if r else float(k * n - (n - 1))
        case "rabenseifner", "all_reduce":
            return 2 * (p - 1) + 2.5 * r
        case "rabenseifner", _:
            return p - 1 + 1.5 * r + k / 2
        case "recursive_halving", _:
            return halved
        case "butterfly", _:  # slots that read the same backwards stay where they are
            return p - 1 + (r + (n - 2 ** ((k + 1) // 2)) / n if r else 0.0)
        case "bruck", "all_to_all":
            return float(sum(way.bit_count() for way in range(n)))
        case "in_order_binary", _:
            return float(n)
        case "binomial", "gather" | "scatter":
            return subtrees
        case "scatter_allgather" | "scatter_allgather_ring", _:
            return subtrees + n - 1
    return 0.0
