"""Which way of splitting the work a transfer belongs to, as people say it: TP, CP, EP, PP, DP, or the step's end."""

from __future__ import annotations

from functools import cache

from clustersim.core.timeline import OpInfo

DIMENSIONS = ("TP", "CP", "EP", "PP", "DP", "step end", "point to point")
"""Every name, in the order of tables. ``step end`` is what joins stages once a step: the gradient norm of all ranks,
and tied embeddings. ``point to point`` is a message that says no dimension, such as a parameter server's."""

_DATA = frozenset({"dp", "edp", "dp_shard", "dp_replicate"})
_CONTEXT = frozenset({"cp", "cp_a2a", "cp_p2p"})
_EXPERT = frozenset({"ep", "etp", "tp"})


def dimension(op: OpInfo) -> str:
    """The name for an op that communicates; collectives without a label join the ranks of data parallelism.

    >>> from clustersim.core.label import Label
    >>> [dimension(OpInfo("x", "all_reduce", "s", label=Label(dim=dim))) for dim in ("tp", "dp-cp", "etp-ep", "embd")]
    ['TP', 'DP', 'EP', 'step end']
    """
    return named("" if op.label is None else op.label.dim, message=op.kind in {"send", "recv"})


@cache
def named(dim: str, message: bool = False) -> str:
    """The name for a dimension of the mesh, or several: ``"dp-cp"``.

    >>> named("dp_shard-cp"), named("etp")
    ('DP', 'TP')
    """
    dims = frozenset(dim.split("-")) - {""}
    if not dims:
        return "point to point" if message else "DP"
    if dims == {"pp"}:
        return "PP"
    if dims & {"pp", "embd"}:
        return "step end"
    if dims & _DATA:
        return "step end" if "tp" in dims else "DP"
    if dims & _CONTEXT:
        return "CP"
    return "EP" if "ep" in dims and dims <= _EXPERT else "TP"
