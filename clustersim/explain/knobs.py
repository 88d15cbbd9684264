"""The knobs that a what-if turns, one row each: what it is called, and what becomes faster with it.

:mod:`clustersim.explain.whatif` bounds what a knob saves from these rows alone; ``studies/what_if/rerun.py`` names the
run that shows what it really saves. A knob that makes ops of some bound or links of some kind faster is a row here and
nothing else. Where a row cannot say what it makes faster, it has a run of its own in ``RERUNS`` there and a case of
``_KnobReplay`` in ``explain/whatif.py``; ``tests/test_explain.py`` holds that a run saves no more than the bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

FACTOR = 2.0
"""How much better a remedy is tried: links twice as wide, a host twice as fast."""
_INSIDE = {"nvlink": "NVLink", "xgmi": "xGMI", "c2c": "C2C"}
"""What links between the GPUs of a node are called, by kind."""
COPY = "copy"
"""What a copy between host and GPU is bound by, beside the bounds of ops."""
_IN_NODE = re.compile(r"^node\d+/")


def _at_node(name: str) -> bool:
    """Whether a link ends at a machine."""
    src, _, dst = name.partition(" -> ")
    return bool(_IN_NODE.match(src) or _IN_NODE.match(dst))


@dataclass(frozen=True)
class WhatIfKnob:
    """A knob of a what-if.

    Parameters
    ----------
    name : what it is asked for by. turned : it and its factor in words, with ``{factor}`` and, for links between the
        GPUs of a node, ``{inside}``.
    helps : what ops are bound by that take 1/factor with it. widens : which links it makes wider, by kind and name;
        None for none. link_kinds : kinds of links that ``widens`` can be true of: names are made when asked for.
    raises_ceiling : a wider link also raises what communication kernels sustain.
    unhides : what is hidden beside compute may be beside none.
    """

    name: str
    turned: str
    helps: frozenset[str] = frozenset()
    widens: Callable[[str, str], bool] | None = None
    link_kinds: frozenset[str] = frozenset()
    raises_ceiling: bool = False
    unhides: bool = False

    def words(self, factor: float, link_kinds: Collection[str] = ()) -> str:
        """It and its factor, with the name that links inside nodes have on a machine with links of these kinds."""
        return self.turned.format(factor=factor, inside=named_inside(link_kinds))


def named_inside(link_kinds: Collection[str]) -> str:
    """What links between the GPUs of a node are called; NVLink where none of these kinds is one.

    >>> named_inside(("net", "xgmi", "pcie"))
    'xGMI'
    """
    return next((name for kind, name in _INSIDE.items() if kind in link_kinds), "NVLink")


KNOB_TABLE = (
    WhatIfKnob("compute speed", "compute speed x{factor:g}", helps=frozenset({"compute", "memory"}), unhides=True),
    WhatIfKnob("host speed", "host speed x{factor:g}", helps=frozenset({"launch", "host"}), unhides=True),
    WhatIfKnob(
        "NVLink",
        "{inside} bandwidth x{factor:g}",
        widens=lambda kind, name: kind in _INSIDE,
        link_kinds=frozenset(_INSIDE),
        raises_ceiling=True,
    ),
    WhatIfKnob(
        "PCIe",
        "PCIe bandwidth x{factor:g}",
        helps=frozenset({COPY}),
        widens=lambda kind, name: kind == "pcie",
        link_kinds=frozenset({"pcie"}),
        raises_ceiling=True,
    ),
    WhatIfKnob(
        "NIC",
        "NIC bandwidth x{factor:g}",
        widens=lambda kind, name: kind == "net" and _at_node(name),
        link_kinds=frozenset({"net"}),
    ),
    WhatIfKnob(
        "fabric",
        "bandwidth between switches x{factor:g}",
        widens=lambda kind, name: kind == "net" and not _at_node(name),
        link_kinds=frozenset({"net"}),
    ),
    WhatIfKnob("latency", "latency /{factor:g}"),
    WhatIfKnob("bucket size", "another bucket size", unhides=True),
    WhatIfKnob("batch", "samples a micro-batch x{factor:g}"),
)
"""What can be asked, in the order in which equal savings are told."""

KNOBS = tuple(knob.name for knob in KNOB_TABLE)
KNOB_NAMED = {knob.name: knob for knob in KNOB_TABLE}
WIDER = {knob.name: knob.widens for knob in KNOB_TABLE if knob.widens}
"""Which links a knob widens, by kind and name."""
