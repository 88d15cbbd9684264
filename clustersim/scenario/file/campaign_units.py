"""Quantities of a ``[campaign]`` table: rates of failure, times that vary, and how often something is done."""

from __future__ import annotations

import math
import re

from clustersim.core.errors import UnitError, nearest
from clustersim.core.texts import Table, shown
from clustersim.core.units import DAY, HOUR, format_time, parse_time

UNITS = ("job", "gpu", "node", "rack", "switch")
"""What a rate is counted of."""
_SPAN = {"hour": HOUR, "day": DAY, "week": 7 * DAY, "month": 2629746.0, "year": 31556952.0}
_RATE = re.compile(
    r"\s*([0-9.]+(?:e-?\d+)?)\s+per\s+(?:([0-9_,]+)\s+)?(?:(gpu|node|rack|switch|job)-)?(hour|day|week|month|year)s?"
    r"(?:\s+of\s+([1-9][0-9]*)\s+GPUs?)?\s*"
)


class Rate(float):
    """Failures per second of one unit: ``"6.5 per 1000 node-days"``, ``"0.47 per 1000 gpu-days"``, ``"1 per week"`` (of
    the job), ``"419 per 110592 node-days of 8 GPUs"`` (of nodes that had 8, on whatever machine).

    of : one of :data:`UNITS`. text : as it was written. gpus : of the nodes it was counted on; 0 where it is of this
    machine's, whatever they have.
    """

    kind_text = "rate of failure"
    example = "a rate with its unit: '6.5 per 1000 node-days', '1 per week'"
    of: str
    text: str
    gpus: int

    def __new__(cls, value: float, of: str = "job", text: str = "", gpus: int = 0) -> Rate:
        rate = super().__new__(cls, value)
        rate.of, rate.text, rate.gpus = of, text, gpus
        return rate

    def __str__(self) -> str:
        return self.text or f"{float(self)!r} per {self.of}-second"

    @classmethod
    def read(cls, value: object) -> Rate:
        """From a file. Raises :class:`UnitError`.

        >>> rate = Rate.read("6.5 per 1000 node-days")
        >>> rate.of, round(rate * 86_400_000, 6)
        ('node', 6.5)
        """
        match = _RATE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise UnitError(
                f"cannot read {shown(value)} as a rate of failures; write it like '6.5 per 1000 node-days' or "
                "'1 per week'"
            )
        count, many, unit, span, gpus = match.groups()
        if gpus and unit != "node":
            raise UnitError(f"{value!r}: only nodes are said to be of so many GPUs: 'node-{span}s of {gpus} GPUs'")
        per = float(re.sub("[_,]", "", many or "1")) * _SPAN[span]
        return cls(float(count) / per, unit or "job", str(value), int(gpus or 0))


class Duration(float):
    """A time that may vary, as its mean [s]: ``"10 min"``, or ``{mean = "30 min", median = "10 min"}`` (lognormal), or
    ``{mean = "4 h", law = "exponential"}``.

    law : ``fixed``, ``exponential`` or ``lognormal``. sigma : of the logarithm.
    """

    kind_text = "time with unit, or law"
    example = "a time with its unit: '10 min', or {mean = '30 min', median = '10 min'}"
    law: str = "fixed"
    sigma: float

    def __new__(cls, value: float, law: str = "fixed", sigma: float = 0.0) -> Duration:
        duration = super().__new__(cls, value)
        duration.law, duration.sigma = law, sigma
        return duration

    def __str__(self) -> str:
        if self.law == "fixed":
            return format_time(float(self))
        return f"{self.law}, mean {format_time(float(self))}" + (f", sigma {self.sigma:g}" if self.sigma else "")

    @classmethod
    def read(cls, value: object) -> Duration:
        """From a file. Raises :class:`UnitError`.

        >>> print(Duration.read("10 min"), "|", Duration.read({"mean": "30 min", "median": "10 min"}))
        600 s | lognormal, mean 1800 s, sigma 1.4823
        """
        if not isinstance(value, dict):
            return cls(parse_time(value))  # type: ignore[arg-type]
        if unknown := [key for key in value if key not in ("mean", "median", "law")]:
            raise UnitError(f"unknown field {unknown[0]!r} of a law; {nearest(unknown[0], ('mean', 'median', 'law'))}")
        if "mean" not in value:
            raise UnitError(f"{value} is a law without a mean; write it like {{mean = '30 min', median = '10 min'}}")
        return cls._of_law(value, parse_time(value["mean"]))

    @classmethod
    def _of_law(cls, value: Table, mean: float) -> Duration:
        law = value.get("law", "lognormal" if "median" in value else "fixed")
        if law not in ("fixed", "exponential", "lognormal"):
            raise UnitError(f"no law {law!r} of times; {nearest(str(law), ('fixed', 'exponential', 'lognormal'))}")
        if (law == "lognormal") != ("median" in value):
            raise UnitError(f"{value}: a median belongs to a lognormal law, which has no other width; give both")
        if law != "lognormal":
            return cls(mean, law)
        median = parse_time(value["median"])
        if not 0 < median <= mean:
            raise UnitError(f"{value}: the median of a lognormal law is above zero and not above its mean")
        return cls(mean, law, round(math.sqrt(2.0 * math.log(mean / median)), 4))


class Every(float):
    """How often something is done: after a time, ``"30 min"``, after ``"100 steps"``, or ``"best"``.

    unit : ``time`` (the value is seconds), ``steps``, or ``best`` (the value is nothing).
    """

    kind_text = "time, steps or best"
    example = "'30 min', '100 steps' or 'best'"
    unit: str

    def __new__(cls, value: float, unit: str = "time") -> Every:
        interval = super().__new__(cls, value)
        interval.unit = unit
        return interval

    def __str__(self) -> str:
        texts = {"time": format_time(float(self)), "steps": f"{float(self):g} steps", "best": "best"}
        return texts[self.unit]

    @classmethod
    def read(cls, value: object) -> Every:
        """From a file. Raises :class:`UnitError`.

        >>> print(Every.read("100 steps"), Every.read("30 min"), Every.read("best"))
        100 steps 1800 s best
        """
        if value == "best":
            return cls(0.0, "best")
        match = re.fullmatch(r"\s*([0-9_]+)\s*steps?\s*", value) if isinstance(value, str) else None
        if match is None:
            try:
                return cls(parse_time(value))  # type: ignore[arg-type]
            except UnitError:
                raise UnitError(f"cannot read {shown(value)}; write it like '30 min', '100 steps' or 'best'") from None
        if int(match.group(1)) < 1:
            raise UnitError(f"{value!r} is not above zero steps")
        return cls(float(match.group(1)), "steps")
