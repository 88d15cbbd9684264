"""A GPU as its user writes it: ``[device]`` of a topology file, or a file of its own.

What the table does not say comes from the device that it extends, or is derived from what it does say and marked as
assumed, each with how far it may be off. What cannot be is refused with its bound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec

from clustersim.core.device import (
    DTYPES,
    SPREADS,
    UNSEEN,
    Assumed,
    Device,
    assumed_notes,
    build,
    device,
    devices,
    families,
    unseen_width,
)
from clustersim.core.device_names import device_from_text
from clustersim.core.errors import TopologyError
from clustersim.core.texts import Table, fields_of, is_file, plain_file, shown, text_of, toml
from clustersim.core.units import Bandwidth, Bytes, Flops, Hertz, quantity

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
"""A part of a nominal rate."""


class DeviceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[device]``: one GPU.

    Parameters
    ----------
    name : in tables and in ``[node] device``. extends : a GPU of ``clustersim list devices`` that it is like.
    generation : architecture, such as ``"sm90"`` or ``"gfx942"``, whose kernels it runs.
    memory : what the driver shows. bandwidth : of the memory, nominal. peak : dtype -> dense rate, with fp32
        accumulation; vendors often print twice that, for sparse operands.
    sms : streaming multiprocessors or compute units. clock : at which the peaks hold. l2 : the last-level cache.
    nvlinks : links to other GPUs. tdp_w : power limit [W]. usd_per_gpu_hour : its price.
    matmul : dtype -> measured share of the peak of the best product. stream : of the bandwidth, of a STREAM-like
        kernel.
    sources : where each of these is from.
    """

    name: str
    extends: str | None = None
    generation: str | None = None
    memory: Bytes | None = None
    bandwidth: Bandwidth | None = None
    peak: dict[str, Flops] = {}
    sms: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    clock: Hertz | None = None
    l2: Bytes | None = None
    nvlinks: Annotated[int, msgspec.Meta(ge=0, le=256)] | None = None
    tdp_w: Annotated[float, msgspec.Meta(ge=1, le=1e5)] | None = None
    usd_per_gpu_hour: Annotated[float, msgspec.Meta(ge=0)] | None = None
    matmul: dict[str, Share] = {}
    stream: Share | None = None
    sources: dict[str, str] = {}


class DeviceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file with one GPU.

    Parameters
    ----------
    device : the GPU.
    """

    device: DeviceSpec


def load(path: str | Path) -> Device:
    """The GPU of a file. Raises :class:`TopologyError` with the file, the field, its value and what would be right."""
    file = Path(path)
    plain_file(file, TopologyError)
    return _loaded(file, text_of(file, TopologyError))


def base_of(path: str | Path) -> str | None:
    """The shipped GPU that the one of a file extends; None for one that stands alone. Raises as :func:`load` does."""
    file = Path(path)
    load(file)
    extends = _spec(file, text_of(file, TopologyError)).extends
    return None if extends is None else _base(extends, f"{file}: $.device").name


@lru_cache(maxsize=64)
def _loaded(file: Path, text: str) -> Device:
    """A device of a file's text, the same one each time it is asked for."""
    return device_of(_spec(file, text), f"{file}: $.device")


def _spec(file: Path, text: str) -> DeviceSpec:
    """``[device]`` of a file's text, as it is written."""
    data = toml(text, str(file), TopologyError)
    try:
        return msgspec.convert(data, DeviceFile, dec_hook=quantity).device
    except msgspec.ValidationError as error:
        raise TopologyError(f"{file}: {error}{_keys(str(error))}") from None


def is_own(gpu: str) -> bool:
    """Whether a GPU is given as a file of its own, and not by a shipped one's name."""
    return gpu.endswith(".toml")


def named(gpu: str) -> Device:
    """The GPU that a file describes, or the shipped one of a name. Raises as :func:`load` and ``device`` do."""
    return load(gpu) if is_own(gpu) else device(gpu)


def is_gpu(name: str) -> bool:
    """Whether a file describes a GPU and nothing else."""
    file = Path(name)
    if file.suffix != ".toml" or not is_file(file):
        return False
    return set(toml(text_of(file, TopologyError), name, TopologyError)) == {"device"}


def _keys(error: str) -> str:
    if "unknown field" not in error:
        return ""
    return f"; [device] has {', '.join(fields_of(DeviceSpec))}"


def device_of(spec: DeviceSpec, place: str) -> Device:
    """The GPU of a table. Raises :class:`TopologyError`; ``place`` : file and field, for its message."""
    if spec.name.lower() in {text.lower() for gpu in devices().values() for text in (gpu.name, *gpu.aliases)}:
        raise TopologyError(f"{place}.name: {spec.name!r} is a shipped device; give yours a name of its own")
    base = None if spec.extends is None else _base(spec.extends, place)
    table, assumed = _completed(spec, base, place)
    gpu = build(spec.name, table)
    every = (*assumed, *gpu.assumed, *_of_base(spec, base, {entry.field for entry in assumed}))
    marked = replace(gpu, assumed=every, notes=assumed_notes(spec.name, every) or gpu.notes)
    _check(marked, spec, place)
    return marked


def _of_base(spec: DeviceSpec, base: Device | None, known: Collection[str]) -> Iterator[Assumed]:
    """What is assumed of the base and of this GPU too, which leaves it as it is; but for those ``known``."""
    for entry in base.assumed if base else ():
        if entry.field not in known and getattr(spec, entry.field) is None:
            yield entry


def _base(name: str, place: str) -> Device:
    try:
        return device(name)
    except TopologyError:
        try:
            return device_from_text(name)
        except TopologyError as error:
            raise TopologyError(f"{place}.extends: {error}") from None


def _completed(spec: DeviceSpec, base: Device | None, place: str) -> tuple[Table, list[Assumed]]:
    """An entry as ``data/devices.toml`` has it, and what of it is assumed."""
    assumed: list[Assumed] = []
    arch = _generation(spec, base, place, assumed)
    for field in ("memory", "bandwidth", "peak"):
        if base is None and not getattr(spec, field):
            raise TopologyError(
                f"{place}.{field} is missing: the data sheet has it; or extend a device that is like it"
            )
    peak = _peaks(spec, base, place, arch, assumed)
    half = peak.get("fp16") or peak.get("bf16") or peak["fp32"]
    say = _Fields(spec, base, assumed)
    sms, clock = say.sms_and_clock(*_work_a_clock(spec, half, families()[arch]))
    table: Table = {
        "family": arch,
        "peak": peak,
        "memory": say.number("memory", "memory_bytes"),
        "bandwidth": say.number("bandwidth", "memory_bandwidth"),
        "sms": sms,
        "clock": clock,
        "nvlinks": int(say.number("nvlinks", "nvlink_links") or 0),
        "tdp_w": say.number("tdp_w", "tdp") or say.power(half),
        "source": "; ".join(f"{field}: {text}" for field, text in spec.sources.items()) or "its user",
        "price": spec.usd_per_gpu_hour or 0.0,
    }
    if l2 := say.number("l2", "l2"):
        table["l2"] = l2
    return table | _shares(spec, base, peak, arch, assumed), assumed


def _generation(spec: DeviceSpec, base: Device | None, place: str, assumed: list[Assumed]) -> str:
    arch = spec.generation or (base.arch if base else "")
    if not arch:
        arch = "other"
        assumed.append(Assumed("generation", "none of ours: kernels as of an average GPU", "rate", UNSEEN))
    if arch not in families():
        raise TopologyError(f"{place}.generation: {shown(arch)} is not known; one of {', '.join(sorted(families()))}")
    return arch


def _peaks(spec: DeviceSpec, base: Device | None, place: str, arch: str, assumed: list[Assumed]) -> dict[str, float]:
    for dtype in (*spec.peak, *spec.matmul):
        if dtype not in DTYPES:
            raise TopologyError(f"{place}: {shown(dtype)} is no dtype of a peak; one of {', '.join(DTYPES)}")
    peak = dict(base.peak) if base else {}
    peak |= {dtype: float(rate) for dtype, rate in spec.peak.items()}
    for dtype, twin in (("fp16", "bf16"), ("bf16", "fp16")):
        if twin in spec.peak and dtype not in spec.peak and not _lacks(arch, dtype):
            peak[dtype] = peak[twin]
    half = peak.get("bf16") or peak.get("fp16")
    if "fp32" not in peak:
        if not half:
            raise TopologyError(f"{place}.peak: needs fp32, bf16 or fp16")
        peak["fp32"] = half / FP32_SHARE
        assumed.append(Assumed("peak.fp32", f"a {FP32_SHARE:.0f}th of 16 bits", "fp32", 0.5))
    if half and (base is None or arch != base.arch):  # a shipped GPU says what it has units for
        for dtype, rate in (("bf16", half), ("fp16", half), ("tf32", half / 2)):
            if dtype not in peak and not _lacks(arch, dtype):
                peak[dtype] = max(rate, peak["fp32"]) if dtype == "tf32" else rate
                assumed.append(Assumed(f"peak.{dtype}", "by its rate in 16 bits", dtype, 0.1))
    return {dtype: peak[dtype] for dtype in DTYPES if dtype in peak}


def _work_a_clock(spec: DeviceSpec, half: float, family: Table) -> tuple[float, float]:
    """A peak, and what an SM does of it in a clock: in 16 bits, or in fp32 where the table says that its products in 16
    bits are held back, as GeForce's are to a half and H20's to a quarter."""
    fp32 = float(spec.peak.get("fp32", 0.0))
    each = family.get("fp32_a_clock", 0.0)
    if each and fp32 / each > HELD_BACK * half / family["flop_a_clock"]:
        return fp32, each
    return half, family["flop_a_clock"]


HELD_BACK = 1.3
"""How much higher the clock that follows from fp32 is than the one from 16 bits, at least, where the latter are held
back: 2 of GeForce's; of parts at full rate it is up to 1.15 (H100 NVL), as tensor cores clock lower under load."""


FP32_SHARE = 16.0
"""Of a peak in 16 bits, one of so many parts is fp32's where nobody says: A100 1/16, H100 1/15, B200 1/28."""
USUAL_DENSITY = 1.4e12
"""[FLOP/s a W] in 16 bits, where nobody says the power limit: A100 0.8e12, H100 1.4e12, B200 2.2e12."""
USUAL_CLOCK = 1.7e9
"""[1/s] where a table says neither its clock nor its SMs: a prior, most GPUs run at 1.4 to 2.1 GHz."""


class _Fields:
    """What a table says, what its base says, and what neither does."""

    def __init__(self, spec: DeviceSpec, base: Device | None, assumed: list[Assumed]) -> None:
        self.spec = spec
        self.base = base
        self.assumed = assumed

    def number(self, field: str, attribute: str) -> float:
        """Of the table, or of the base, or 0."""
        value = getattr(self.spec, field)
        if value is not None:
            return float(value)
        return float(getattr(self.base, attribute)) if self.base else 0.0

    def sms_and_clock(self, rate: float, flop_a_clock: float) -> tuple[int, float]:
        """Both, or either from a peak and what an SM of its generation does of that in a clock."""
        # A base's clock is of its own peaks: with a peak or SMs of its own, the table has its own clock.
        keeps = not self.spec.peak and self.spec.sms is None
        clock = float(self.spec.clock or (self.base.clock if self.base and keeps else 0.0))
        sms = int(self.number("sms", "sms"))
        if not sms:
            sms = max(1, round(rate / (flop_a_clock * (clock or USUAL_CLOCK))))
            how = f"{sms}, from the peak and {flop_a_clock:,.0f} FLOP a clock"
            self.assumed.append(Assumed("sms", how, "sms", SPREADS["sms"]))
        if not clock:
            clock = rate / (sms * flop_a_clock)
            how = f"{clock / 1e6:,.0f} MHz, from the peak and the SMs"
            self.assumed.append(Assumed("clock", how, "clock", SPREADS["clock"]))
        return sms, clock

    def power(self, half: float) -> float:
        """A power limit by the peak."""
        watts = half / USUAL_DENSITY
        how = f"{watts:,.0f} W, by its rate in 16 bits"
        self.assumed.append(Assumed("tdp_w", how, "tdp_w", SPREADS["tdp_w"]))
        return watts


def _shares(
    spec: DeviceSpec, base: Device | None, peak: Mapping[str, float], arch: str, assumed: list[Assumed]
) -> Table:
    """What products and streams reach: measured, or the base's where its peak and power are its, or its kind's."""
    halves = {"bf16", "fp16"} if {"bf16", "fp16"} & set(spec.peak) else set()
    changed = (
        set(spec.peak) | halves | ({"fp16", "bf16", "fp8", "fp4"} if spec.tdp_w is not None or spec.clock else set())
    )
    matmul: dict[str, list[float | str]] = {}
    for dtype in peak:
        if dtype in spec.matmul:
            matmul[dtype] = [spec.matmul[dtype], spec.sources.get("matmul", "its user")]
        elif base and dtype in base.matmul and dtype not in changed:
            figure = base.matmul[dtype]
            matmul[dtype] = [figure.value, f"estimated: as {base.name}" if figure.estimated else figure.source]
            if figure.unseen:
                value = f"{figure.value:.0%} of the peak, which nobody measured on {arch}"
                assumed.append(Assumed(f"matmul.{dtype}", value, dtype, unseen_width(dtype)))
        else:
            value = families()[arch]["matmul"].get(dtype, 0.7)
            matmul[dtype] = [value, f"estimated: of its generation {arch}"]
            assumed.append(Assumed(f"matmul.{dtype}", f"{value:.0%} of the peak, as of {arch}", dtype, LEVEL_SPREAD))
    stream = spec.stream or (base.stream.value if base and spec.bandwidth is None else families()[arch]["stream"])
    if spec.stream is None and (base is None or spec.bandwidth is not None):
        assumed.append(Assumed("stream", f"{stream:.0%} of the bandwidth, as of {arch}", "memory", 0.06))
    return {"matmul": matmul, "stream": [stream, spec.sources.get("stream", "estimated: of its generation")]}


LEVEL_SPREAD = 0.15
"""Relative half-width of the best measured matmul rate of a GPU around its generation's. Of the data-centre GPUs of
``data/devices.toml`` that share a generation (sm80, sm90, sm100) none is further than 7 % from the mean; generations
lie 13 % from each other; of sm86 workstations' have 0.73 to 0.82 and gamers', with half of their peaks, about 1."""


def _check(gpu: Device, spec: DeviceSpec, place: str) -> None:
    """Refuse what no GPU is. Raises :class:`TopologyError` with the bound; what is written goes before what follows."""
    least = 2**30
    most = 2**42
    if not least <= gpu.memory_bytes <= most:
        raise TopologyError(
            f"{place}.memory: {gpu.memory_bytes:,.0f} bytes; a GPU has 1 GiB to 4 TiB, such as '80 GiB'"
        )
    if not 1e10 <= gpu.memory_bandwidth <= 1e14:
        raise TopologyError(
            f"{place}.bandwidth: {gpu.memory_bandwidth / 1e9:,.4g} GB/s; a GPU's memory has 10 to 100,000"
        )
    for dtype, rate in sorted(gpu.peak.items(), key=lambda pair: pair[0] not in spec.peak):
        # A product of large matrices does some 100 FLOP a byte; below one FLOP a byte no kernel is arithmetic.
        if rate < gpu.memory_bandwidth:
            bound = gpu.memory_bandwidth / 1e12
            raise TopologyError(
                f"{place}.peak.{dtype}: {rate / 1e12:,.4g} TFLOP/s is less than the memory's own bound of one FLOP a "
                f"byte: {bound:,.4g} TFLOP/s"
            )
        if rate > 1e18:
            raise TopologyError(f"{place}.peak.{dtype}: {rate / 1e12:,.4g} TFLOP/s; a GPU has less than 1,000,000")
    for dtype in gpu.peak:
        if why := _lacks(gpu.arch, dtype):
            raise TopologyError(f"{place}.peak.{dtype}: {gpu.arch} has no {dtype} units; {why}")
    order = [name for name in ("fp32", "tf32", "bf16", "fp8", "fp4") if name in gpu.peak]
    for wide, narrow in pairwise(order):
        if gpu.peak[narrow] < gpu.peak[wide] * (1 - 1e-9):
            raise TopologyError(
                f"{place}.peak.{narrow}: {gpu.peak[narrow] / 1e12:,.4g} TFLOP/s is less than {wide}'s "
                f"{gpu.peak[wide] / 1e12:,.4g}; fewer bits are never slower"
            )
    if not 2e8 <= gpu.clock <= 5e9:
        raise TopologyError(
            f"{place}: peak, sms and clock do not agree: a clock of {gpu.clock / 1e6:,.0f} MHz; GPUs have 200 to 5,000"
        )
    if not 2**18 <= gpu.l2 <= gpu.memory_bytes / 4:
        raise TopologyError(f"{place}.l2: {gpu.l2 / 2**20:,.4g} MiB; between 0.25 MiB and a quarter of the memory")


SINCE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "sm": {"tf32": "sm80", "bf16": "sm80", "fp8": "sm89", "fp4": "sm100"},
        "gfx": {"fp8": "gfx942", "fp4": "gfx950"},
    }
)
"""Maker -> dtype -> the first architecture with units for it: the CUDA programming guide's table of compute
capabilities, and AMD's instruction sets of CDNA 2 to 4."""


XF32 = "gfx942"
"""The one architecture of AMD's with units for TF32, which AMD calls xf32: CDNA 4 has dropped them (LLVM's
``FeatureXF32Insts``, which gfx942 alone has)."""


def _lacks(arch: str, dtype: str) -> str:
    """Why an architecture has no units for a dtype; "" where it has them, or is unknown."""
    maker = "gfx" if arch.startswith("gfx") else "sm"
    if maker == "gfx" and dtype == "tf32" and arch != XF32:
        return f"{XF32} alone has them"
    since = SINCE[maker].get(dtype, "")
    if not since or not arch.startswith(maker):
        return ""
    base = 16 if maker == "gfx" else 10
    own, first = (int(name.removeprefix(maker), base) for name in (arch, since))
    return f"they came with {since}" if own < first else ""
