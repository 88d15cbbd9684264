"""Text with a unit <-> SI floats. Everything inside clustersim is bytes, seconds, bytes/s and FLOP/s.

Prefixes: ``k M G T P`` are decimal, ``Ki Mi Gi Ti`` binary; ``b`` is a bit and ``B`` a byte, and case matters, because
400 Gb/s and 400 GB/s differ by eight. Message sizes on a command line follow nccl-tests (``128M`` is 128 MiB), which
:func:`parse_message_size` reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Self

from clustersim.core.errors import UnitError

HOUR = 3600.0
DAY = 86400.0
"""[s]."""
_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PREFIX |= {"ki": 2.0**10, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0, "h": HOUR, "d": DAY}
_NUMBER = r"\s*([+-]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*"
_BYTES = re.compile(_NUMBER + r"([kKMGTP]i?)?(b|B|bit|bits|byte|bytes)\s*")
_BANDWIDTH = re.compile(_NUMBER + r"([kKMGTP]i?)?(?:(b|B)(?:/s|ps)|(?:bit/s))\s*")
_FLOPS = re.compile(_NUMBER + r"([kKMGTP])?FLOP(?:/s|S|s)\s*")
_HERTZ = re.compile(_NUMBER + r"([kKMG])?Hz\s*")
_SECONDS = re.compile(_NUMBER + r"(s|ms|us|µs|μs|ns|min|h|d)\s*")
_MESSAGE = re.compile(_NUMBER + r"([kKMGT])?(i?B)?\s*")


def _parse(text: object, pattern: re.Pattern[str], noun: str, example: str) -> re.Match[str]:
    if isinstance(text, int | float) and not isinstance(text, bool):
        raise UnitError(f"{text!r} is a bare number where {noun} is needed; write it like {example}")
    match = pattern.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UnitError(f"cannot read {text!r} as {noun}; write it like {example}")
    return match


def _scaled(match: re.Match[str]) -> float:
    """The number times its prefix."""
    return float(match[1].replace("_", "")) * _PREFIX[match[2] or ""]


def parse_bandwidth(text: str) -> float:
    """Bytes per second, of one direction, from text such as ``"400 Gb/s"`` or ``"50 GB/s"``.

    >>> parse_bandwidth("400 Gb/s")
    50000000000.0
    """
    match = _parse(text, _BANDWIDTH, "a bandwidth", "'400 Gb/s' or '50 GB/s'")
    bits = match.group(3) != "B"
    return _positive(_scaled(match) / (8.0 if bits else 1.0), text, "a bandwidth")


def parse_bytes(text: str) -> float:
    """Bytes from text such as ``"80 GB"`` (decimal) or ``"25 MiB"`` (binary).

    >>> parse_bytes("25 MiB")
    26214400.0
    """
    match = _parse(text, _BYTES, "a size", "'80 GB' or '25 MiB'")
    bits = match.group(3).startswith("b") and match.group(3) not in {"byte", "bytes"}
    return _positive(_scaled(match) / (8.0 if bits else 1.0), text, "a size", zero=True)


def parse_time(text: str) -> float:
    """Seconds from text such as ``"500 ns"``, ``"3.4 us"`` or ``"2 min"``.

    >>> parse_time("500 ns")
    5e-07
    """
    match = _parse(text, _SECONDS, "a time", "'500 ns' or '3.4 us'")
    # Divide by the whole power of ten: 500 / 1e9 is the float nearest 5e-7, 500 * 1e-9 is not.
    number = float(match.group(1).replace("_", ""))
    scale = _TIME[match.group(2)]
    return _positive(number * scale if scale >= 1 else number / round(1 / scale), text, "a time", zero=True)


def parse_flops(text: str) -> float:
    """FLOP per second from text such as ``"989 TFLOP/s"``.

    >>> parse_flops("989 TFLOP/s")
    989000000000000.0
    """
    return _positive(_scaled(_parse(text, _FLOPS, "a compute rate", "'989 TFLOP/s'")), text, "a compute rate")


def parse_frequency(text: str) -> float:
    """Clocks per second from text such as ``"1980 MHz"``.

    >>> parse_frequency("1980 MHz")
    1980000000.0
    """
    return _positive(_scaled(_parse(text, _HERTZ, "a clock rate", "'1980 MHz'")), text, "a clock rate")


class Quantity(float):
    """A number in a file's schema that is written with its unit.

    kind_text, example : what is to be written, in words. number : reads the text.
    """

    kind_text = ""
    example = ""
    number: Callable[[Any], float]

    @classmethod
    def read(cls, value: object) -> Self:
        """From a file. Raises :class:`UnitError`."""
        return cls(cls.number(value))


class Bandwidth(Quantity):
    """Bytes/s, in a file's schema: written as ``"400 Gb/s"``; a bare number is an error."""

    kind_text = "rate with unit"
    example = "a rate with its unit: '400 Gb/s', '50 GB/s'"
    number = staticmethod(parse_bandwidth)


class CopyRate(Bandwidth):
    """Bytes/s of copies, in a file's schema: a rate, or ``true`` (infinity here) for what the machine's links give."""

    kind_text = "true, or rate with unit"
    example = "true, or a rate with its unit: '20 GB/s'"
    also = ("boolean",)

    @classmethod
    def read(cls, value: object) -> Self:
        """From a file. Raises :class:`UnitError`."""
        if value is False:
            raise UnitError("false: leave it out where nothing is copied")
        return cls(float("inf")) if value is True else super().read(value)


class Seconds(Quantity):
    """Seconds, in a file's schema: written as ``"500 ns"``; a bare number is an error."""

    kind_text = "time with unit"
    example = "a time with its unit: '25 ns', '60 d'"
    number = staticmethod(parse_time)


class Bytes(Quantity):
    """Bytes, in a file's schema: written as ``"25 MiB"``; a bare number is an error."""

    kind_text = "size with unit"
    example = "a size with its unit: '8 B', '25 MiB'"
    number = staticmethod(parse_bytes)


class Flops(Quantity):
    """FLOP/s, in a file's schema: written as ``"989 TFLOP/s"``; a bare number is an error."""

    kind_text = "rate of arithmetic with unit"
    example = "a rate with its unit: '989 TFLOP/s'"
    number = staticmethod(parse_flops)


class Hertz(Quantity):
    """Clocks/s, in a file's schema: written as ``"1980 MHz"``; a bare number is an error."""

    kind_text = "clock rate with unit"
    example = "a clock rate with its unit: '1980 MHz'"
    number = staticmethod(parse_frequency)


LARGEST_MESSAGE = 2**60
"""Bytes; all GPUs that were ever built hold less."""


def parse_message_size(text: str) -> int:
    """Bytes of a message as nccl-tests reads ``-b``/``-e``: ``8``, ``1K``, ``128M``, ``1GiB``; prefixes are binary.

    >>> parse_message_size("128M") == parse_message_size("128MiB") == 128 * 2**20
    True
    """
    example = "'1GiB', '128M' or '4096'"
    match = _parse(text, _MESSAGE, "a message size", example)
    scale = 2.0 ** {None: 0, "k": 10, "K": 10, "M": 20, "G": 30, "T": 40}[match.group(2)]
    value = _positive(float(match.group(1).replace("_", "")) * scale, text, "a message size")
    if value != int(value):
        raise UnitError(f"{text!r} is not a whole number of bytes; write it like {example}")
    if value > LARGEST_MESSAGE:
        raise UnitError(f"{text!r} is larger than any message: at most 1 EiB")
    return int(value)


def parse_nccl_version(text: str) -> tuple[int, int]:
    """``"2.28.3"`` -> (2, 28). Raises :class:`UnitError`."""
    parts = text.split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts):
        raise UnitError(f"{text!r} is not an NCCL version; write it like '2.28'")
    return int(parts[0]), int(parts[1])


def _positive(value: float, text: str, noun: str, *, zero: bool = False) -> float:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise UnitError(f"{text!r} is not {noun}: it must be {'at least' if zero else 'above'} zero")
    return value


def format_bytes(nbytes: float) -> str:
    """Bytes in the nearest binary prefix, as buckets and memory are quoted.

    >>> format_bytes(25 * 2**20)
    '25 MiB'
    """
    for prefix, scale in (("Pi", 2.0**50), ("Ti", 2.0**40), ("Gi", 2.0**30), ("Mi", 2.0**20), ("Ki", 2.0**10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.4g} {prefix}B"
    return f"{nbytes:.4g} B"


def format_bandwidth(rate: float) -> str:
    """Bytes per second in decimal GB/s, as NCCL prints bandwidth.

    >>> format_bandwidth(5e10)
    '50 GB/s'
    """
    value = rate / 1e9
    return f"{value:.0f} GB/s" if value >= 1e4 else f"{value:.4g} GB/s"


def format_time(seconds: float) -> str:
    """Seconds in the unit a person would choose.

    >>> format_time(0.04228)
    '42.28 ms'
    """
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"


def format_long(seconds: float) -> str:
    """Seconds in days, hours or minutes where those are more than one.

    >>> format_long(11140.0), format_long(45.0)
    ('3.094 h', '45 s')
    """
    for unit, scale in (("d", DAY), ("h", HOUR), ("min", 60.0)):
        if abs(seconds) >= 2 * scale:
            return f"{seconds / scale:.4g} {unit}"
    return format_time(seconds)


def format_days(days: float) -> str:
    """Days in the unit that fits; a rounding below 0 is none.

    >>> format_days(4.14), format_days(0.03), format_days(-1e-9)
    ('4.14 d', '43.2 min', '0 s')
    """
    return format_long(max(0.0, days) * DAY)


def quantity(kind: type, value: object) -> object:
    """msgspec's ``dec_hook`` for fields whose type reads itself, such as :class:`Bandwidth`. Raises
    :class:`UnitError`."""
    if hasattr(kind, "read"):
        return kind.read(value)
    raise NotImplementedError(kind)


def format_change(share: float) -> str:
    """A relative change for people; what would be written as none has no sign.

    >>> format_change(-0.104), format_change(0.072), format_change(-0.0001)
    ('-10.4%', '+7.2%', '0.0%')
    """
    return "0.0%" if abs(share) < 5e-4 else f"{share:+.1%}"
