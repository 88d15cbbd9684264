"""The figures that are said of a run: one row each, read by every place that shows one.

A figure that is added here appears in ``run``, ``report``, ``sweep``, ``explore`` and ``--json``, as far as its row
says; tests/test_figures.py holds that, and the README's list of figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from clustersim.core.units import format_bytes, format_time

Values = Mapping[str, Any]
"""What ``clustersim run --json`` prints of one run, by key."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure.

    Parameters
    ----------
    key : its name in ``result.json``; a time is in seconds, a size in bytes, a share of 1.
    label : what people call it. head : the same at the head of a narrow column; the label where it is empty.
    unit : ``"time"``, ``"bytes"``, ``"percent"`` or ``"number"``.
    better : 1 where more of it is better, -1 where less is, 0 for neither.
    of_equal_steps : whether two values can only be compared where the steps are of as many samples.
    shown : where it is shown: ``"run"`` (the table of a run, and explore's), ``"report"`` (the tiles of a run's page),
        ``"sweep"`` (``table.csv``) and ``"rows"`` (the table of a sweep's page).
    value : computed from the other values of a run; None for what the summary has.
    """

    key: str
    label: str
    unit: str
    head: str = ""
    better: int = 0
    of_equal_steps: bool = False
    shown: frozenset[str] = frozenset({"run"})
    value: Callable[[Values], float | None] | None = None

    @property
    def column(self) -> str:
        """Its name at the head of a narrow column."""
        return self.head or self.label

    def text(self, value: float) -> str:
        """A value as people read it."""
        return value_text(value, self.unit)


def _row(key: str, label: str, unit: str, shown: str, **more: Any) -> Figure:
    return Figure(key=key, label=label, unit=unit, shown=frozenset(shown.split()), **more)


FIGURES = (
    _row("step_time_s", "step time", "time", "run report sweep rows", better=-1, of_equal_steps=True),
    _row("samples_per_s", "samples per second", "number", "run report sweep rows", head="samples/s", better=1),
    _row("tokens_per_s", "tokens per second", "number", "sweep rows", head="tokens/s", better=1),
    _row("tokens_per_s_per_gpu", "tokens per second and GPU", "number", "run report sweep", better=1),
    _row("mfu", "MFU", "percent", "run report sweep rows", better=1),
    _row("hfu", "HFU", "percent", "run sweep"),
    _row("compute_s", "compute", "time", "run sweep"),
    _row("communication_s", "communication", "time", "run sweep"),
    _row("exposed_communication_s", "exposed communication", "time", "sweep", better=-1, of_equal_steps=True),
    _row("peer_wait_s", "waiting inside communication", "time", "sweep", better=-1, of_equal_steps=True),
    _row("exposed_transfer_s", "exposed transfer", "time", "run", better=-1, of_equal_steps=True),
    _row("waiting_for_peer_s", "waiting for a peer", "time", "run", better=-1, of_equal_steps=True),
    _row("bubble_s", "bubble", "time", "run", better=-1, of_equal_steps=True),
    _row("idle_s", "host, other", "time", "run sweep", head="idle", better=-1, of_equal_steps=True),
    _row("bytes_sent_per_gpu", "sent per GPU and step", "bytes", "run report sweep rows", head="sent per GPU"),
    _row("peak_memory_bytes", "peak memory per GPU", "bytes", "run report sweep rows", head="memory", better=-1),
)
"""Every figure, in the order in which tables have them."""


def shown_in(place: str) -> tuple[Figure, ...]:
    """The figures that a place shows, in order."""
    return tuple(figure for figure in FIGURES if place in figure.shown)


def computed(values: Values) -> dict[str, float]:
    """Figures that follow from the others of a run, by key; none that has no value there."""
    rows = ((figure.key, figure.value(values)) for figure in FIGURES if figure.value is not None)
    return {key: value for key, value in rows if value is not None}


def known(values: Values) -> dict[str, float]:
    """The figures of a run that have a value, by key."""
    return {figure.key: values[figure.key] for figure in FIGURES if values.get(figure.key) is not None}


def in_words(values: Values, place: str) -> Iterator[tuple[str, str]]:
    """(label, value as text) of every figure that a place shows and a run has."""
    for figure in shown_in(place):
        if values.get(figure.key) is not None:
            yield figure.label, figure.text(values[figure.key])


def value_text(value: float, unit: str) -> str:
    """A figure as text; ``unit`` : ``"time"``, ``"bytes"``, ``"percent"`` or ``"number"``.

    >>> value_text(0.3297, "time"), value_text(0.4091, "percent"), value_text(12424.13, "number")
    ('329.7 ms', '40.9%', '12,424.1')
    """
    if unit == "time":
        return format_time(value)
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:.1%}" if unit == "percent" else rate_text(value)


def rate_text(value: float) -> str:
    """A number with one decimal; one below 1, such as samples per second of a long context, with two digits.

    >>> rate_text(12424.13), rate_text(0.0), rate_text(0.004697)
    ('12,424.1', '0.0', '0.0047')
    """
    return f"{value:,.1f}" if abs(value) >= 0.95 or not value else f"{value:.2g}"
