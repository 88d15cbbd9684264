"""One GPU, or one CPU core, as data: peak rates, memory, and how much of each a real kernel reaches, with sources.

The figures are in ``data/devices.toml``; :func:`device` looks a name or alias up, and
:func:`clustersim.core.device_names.device_from_text` reads a GPU as tables and logs write it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec

from clustersim.core.errors import TopologyError, nearest, nearest_name
from clustersim.core.texts import Table, data_table
from clustersim.core.units import parse_bandwidth, parse_bytes, parse_flops, parse_frequency, parse_time


@dataclass(frozen=True)
class SourcedFigure:
    """A number with where it comes from.

    Parameters
    ----------
    value : in SI units, or a fraction. source : who measured or printed it. estimated : it was carried over from the
        architecture family or argued, not measured. unseen : nobody measured it on any GPU of the generation.
    """

    value: float
    source: str
    estimated: bool = False
    unseen: bool = False


@dataclass(frozen=True)
class Assumed:
    """A figure of a GPU that nobody stated.

    Parameters
    ----------
    field : of ``[device]``. value : what is taken, in words. moves : what it acts on: a dtype whose products it
        changes, ``"memory"``, ``"rate"`` (all of them), or another field. spread : relative half-width, nine in ten.
    """

    field: str
    value: str
    moves: str
    spread: float


SPREADS: Mapping[str, float] = MappingProxyType({"sms": 0.25, "clock": 0.1, "l2": 0.5, "tdp_w": 0.4})
"""Relative half-widths, nine in ten, of figures of the chip that no sheet states. Caches of a generation are within
half of what most of it have: 36 to 96 MiB of sm89, 3 to 6 of sm86, 24 to 40 of sm80."""
UNSEEN = 0.15
"""Half-width (nine in ten) of what a generation of GPUs adds on which no published step ran: as far as kernels of a
generation may be from those of an average GPU. Kernels above 30 GFLOP of a GPU that is left out are off by 15 % in 16
bits, nine in ten (``python -m tests.evidence gpus``)."""
UNSEEN_NARROW = 0.25
"""The same in 8 bits and fewer: of a GPU that is left out 25 % per tensor, 24 % by blocks, 19 % in nvfp4."""


def unseen_width(dtype: str) -> float:
    """Half-width (nine in ten) of kernels in ``dtype`` on a generation of GPUs on which no published step ran.

    >>> unseen_width("bf16"), unseen_width("fp8")
    (0.15, 0.25)
    """
    return UNSEEN_NARROW if dtype in NARROW else UNSEEN


@dataclass(frozen=True)
class FlashRate:
    """Rate of a fused attention kernel, forward and backward together: ``rate * s / (s + s0)`` at sequence length s.

    Parameters
    ----------
    rate : float [FLOP/s], counting 2 b h s^2 d forward for a causal mask (4 without), and 2.5 times that backward.
    s0_causal, s0_full : float [tokens], the half-speed length with and without a causal mask.
    """

    rate: float
    s0_causal: float
    s0_full: float


@dataclass(frozen=True, eq=False)
class Device:
    """A GPU (one die with its own memory), or a core of a CPU.

    Parameters
    ----------
    name, aliases : as topology files and as tables write it. arch : ``"sm90"``, ``"gfx942"``. sm : CUDA compute
        capability times ten; 0 for other vendors.
    peak : dtype -> float [FLOP/s], dense, with fp32 accumulation.
    memory_bytes : float [bytes]. memory_bandwidth : float [bytes/s], nominal. sms : compute units. clock : float [1/s],
        at which the peaks hold. l2 : float [bytes], the last-level cache. nvlink_links : 0 without. tdp : float [W].
    matmul : dtype -> the best measured matmul rate (MAMF), a fraction of ``peak``. stream : STREAM-like bandwidth, a
        fraction of ``memory_bandwidth``.
    attention : fused kernel -> head dimension -> :class:`FlashRate`, where charts have it; empty of a kernel that
        follows the kernel law. kernel_floor : SourcedFigure [s], the least time of one kernel
        in a busy stream. launch : SourcedFigure [s], host time to launch one kernel from an eager framework.
    source : str, of the peak rates. notes : which figures are estimates or assumed. p2p : whether its driver lets it
        read another one over PCIe. assumed : figures that nobody stated.
    fp32_matrices : its matrix units multiply fp32, too.
    """

    name: str
    aliases: tuple[str, ...]
    arch: str
    sm: int
    peak: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    sms: int
    clock: float
    l2: float
    nvlink_links: int
    tdp: float
    matmul: Mapping[str, SourcedFigure]
    stream: SourcedFigure
    attention: Mapping[str, Mapping[int, FlashRate]]
    kernel_floor: SourcedFigure
    launch: SourcedFigure
    source: str
    notes: tuple[str, ...] = field(default=())
    usd_per_gpu_hour: float = 0.0
    p2p: bool = True
    assumed: tuple[Assumed, ...] = ()
    fp32_matrices: bool = False

    @property
    def amd(self) -> bool:
        """Whether ROCm's kernels run on it."""
        return self.arch.startswith("gfx")

    @property
    def smi(self) -> str:
        """The command of its driver that shows its memory in use."""
        return "amd-smi" if self.amd else "nvidia-smi"

    @property
    def collective_library(self) -> str:
        """Whose collectives its PyTorch runs as ``nccl``."""
        return "RCCL" if self.amd else "NCCL"

    def matmul_rate(self, dtype: str) -> float:
        """Best measured matmul rate [FLOP/s] in a dtype; one the hardware lacks runs as :meth:`runs_as` says."""
        dtype = self.runs_as(dtype)
        return self.peak[dtype] * self.matmul[dtype].value

    def stream_rate(self) -> float:
        """Measured memory bandwidth [bytes/s] of large streaming kernels."""
        return self.memory_bandwidth * self.stream.value

    def runs_as(self, dtype: str) -> str:
        """The dtype whose units execute a matmul: TF32 before Ampere is fp32, fp8 before Ada is bf16 or fp16.

        >>> device("V100-SXM2-16GB").runs_as("tf32")
        'fp32'
        """
        for unit_dtype in _FALLBACK.get(dtype, (dtype,)):
            if unit_dtype in self.peak:
                return unit_dtype
        raise TopologyError(f"{self.name} has no rate for dtype {dtype!r}; {nearest(dtype, [*self.peak, *_FALLBACK])}")


def with_efficiencies(device: Device, values: Mapping[str, float]) -> Device:
    """The device with some efficiencies replaced, by flat name: ``matmul.bf16``, ``stream``, ``kernel_floor``,
    ``launch``; of a dtype it has no units for nothing is replaced.

    >>> with_efficiencies(device("H100-SXM5-80GB"), {"matmul.bf16": 0.5}).matmul["bf16"].value
    0.5
    """
    fitted = {name: SourcedFigure(value, "fitted to this machine's measurements") for name, value in values.items()}
    matmul = {d: fitted.get(f"matmul.{d}", figure) for d, figure in device.matmul.items()}
    plain = {name: fitted.get(name, getattr(device, name)) for name in ("stream", "kernel_floor", "launch")}
    return replace(device, matmul=MappingProxyType(matmul), **plain)


class Speed(msgspec.Struct, frozen=True):
    """What a GPU's rates are multiplied by: ``compute``, of its arithmetic; ``memory``, the bandwidth of its memory."""

    compute: float = 1.0
    memory: float = 1.0


AS_IS = Speed()


def faster(device: Device, speed: Speed) -> Device:
    """The device with other rates.

    >>> faster(device("H100-SXM5-80GB"), Speed(memory=1.2)).memory_bandwidth / device("H100-SXM5-80GB").memory_bandwidth
    1.2
    """
    if speed == AS_IS:
        return device
    attention = {
        kernel: MappingProxyType({dim: replace(flash, rate=flash.rate * speed.compute) for dim, flash in rates.items()})
        for kernel, rates in device.attention.items()
    }
    return replace(
        device,
        attention=MappingProxyType(attention),
        peak=MappingProxyType({dtype: rate * speed.compute for dtype, rate in device.peak.items()}),
        clock=device.clock * speed.compute,
        memory_bandwidth=device.memory_bandwidth * speed.memory,
    )


def paced(device: Device, kernels: float, host: float) -> Device:
    """The device whose kernels take so many times as long as usual, and its host's calls; peaks stay the maker's."""
    if (kernels, host) == (1.0, 1.0):
        return device
    attention = {
        kernel: MappingProxyType({dim: replace(flash, rate=flash.rate / kernels) for dim, flash in rates.items()})
        for kernel, rates in device.attention.items()
    }
    return replace(
        device,
        attention=MappingProxyType(attention),
        matmul=MappingProxyType({d: replace(own, value=own.value / kernels) for d, own in device.matmul.items()}),
        stream=replace(device.stream, value=device.stream.value / kernels),
        kernel_floor=replace(device.kernel_floor, value=device.kernel_floor.value * kernels),
        launch=replace(device.launch, value=device.launch.value * host),
    )


def of_cores(core: Device, cores: float) -> Device:
    """What a process has that runs on some cores of a CPU: their arithmetic, bandwidth and memory together.

    Processes that share a core take turns (``cores`` below 1), so what an op costs to start is shared as well.

    >>> pair = of_cores(device("x86-core"), 2)
    >>> pair.matmul_rate("fp32") == 2 * device("x86-core").matmul_rate("fp32")
    True
    """
    turns = max(1.0, 1.0 / cores)
    return replace(
        faster(core, Speed(compute=cores, memory=cores)),
        memory_bytes=core.memory_bytes * cores,
        kernel_floor=replace(core.kernel_floor, value=core.kernel_floor.value * turns),
        launch=replace(core.launch, value=core.launch.value * turns),
    )


DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
"""Element types that GPUs have matmul rates for."""
NARROW = ("fp8", "fp4")
"""Those whose products need scales: what they do to a loss is nobody's prediction."""

_FALLBACK = {
    "fp32": ("fp32",),
    "tf32": ("tf32", "fp32"),
    "fp16": ("fp16", "fp32"),
    "bf16": ("bf16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "fp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
}


@lru_cache(maxsize=1)
def devices() -> Mapping[str, Device]:
    """Every shipped device by name, in file order."""
    table = _raw()["device"]
    return MappingProxyType({name: build(name, _whole_entry(name, table)) for name in table})


def device(name: str) -> Device:
    """The device of a name or exact alias, case ignored. Raises :class:`TopologyError` with the nearest known name.

    >>> device("H100-SXM5-80GB").sm, device("NVIDIA H100 80GB HBM3").name
    (90, 'H100-SXM5-80GB')
    """
    named = by_name().get(str(name).strip().lower())
    if named is None:
        every_name = [text for gpu in devices().values() for text in (gpu.name, *gpu.aliases)]
        meant = nearest_name(name, every_name)
        raise TopologyError(f"unknown device {name!r}; {nearest(name, devices() if meant is None else every_name)}")
    return named


@lru_cache(maxsize=1)
def by_name() -> Mapping[str, Device]:
    """Every shipped device by its name and its aliases in lower case."""
    return {text.lower(): d for d in devices().values() for text in (d.name, *d.aliases)}


def families() -> Table:
    """Architectures by name: what kernels reach on each, where a device has no measurement of its own."""
    table: Table = _raw()["family"]
    return table


def _raw() -> Table:
    return data_table("devices")


def build(name: str, entry: Table) -> Device:
    """A device from an entry as ``data/devices.toml`` has it: quantities are text with units, or SI numbers."""
    family = families()[entry["family"]]
    times = {**_raw()["defaults"], **family}  # that most families share
    peak = {dtype: _si(rate, parse_flops) for dtype, rate in entry["peak"].items()}
    estimate = f"estimated from family {entry['family']}: {family['source']}"
    own = {dtype: _figure(pair) for dtype, pair in entry.get("matmul", {}).items()}
    unseen = family.get("unmeasured", ())
    matmul = {d: own.get(d) or SourcedFigure(family["matmul"][d], estimate, True, d in unseen) for d in peak}
    stream = _figure(entry["stream"]) if "stream" in entry else SourcedFigure(family["stream"], estimate, True)
    half = peak.get("fp16", peak["fp32"])
    guessed = [f"{dtype} matmul" for dtype, f in matmul.items() if f.estimated] + ["bandwidth"] * stream.estimated
    notes = (f"{name}: {', '.join(guessed)} share estimated, not measured on this device",) if guessed else ()
    follows = half / (entry["sms"] * family["flop_a_clock"])
    assumed = _unstated(entry)
    return Device(
        name=name,
        aliases=tuple(entry.get("aliases", ())),
        arch=entry["family"],
        sm=int(entry["family"][2:]) if entry["family"].startswith("sm") else 0,
        peak=MappingProxyType(peak),
        memory_bytes=_si(entry["memory"], parse_bytes),
        memory_bandwidth=_si(entry["bandwidth"], parse_bandwidth),
        sms=entry["sms"],
        clock=_si(entry["clock"], parse_frequency) if "clock" in entry else follows,
        l2=_si(entry.get("l2", family["l2"]), parse_bytes),
        nvlink_links=entry.get("nvlinks", 0),
        tdp=float(entry["tdp_w"]),
        matmul=MappingProxyType(matmul),
        stream=stream,
        attention=MappingProxyType({k: _rates(table, half) for k, table in family["attention"].items()}),
        kernel_floor=SourcedFigure(parse_time(times["kernel_floor"]), times["kernel_floor_source"]),
        launch=SourcedFigure(parse_time(times["launch"]), times["launch_source"]),
        source=entry["source"],
        notes=notes + assumed_notes(name, assumed),
        usd_per_gpu_hour=float(entry.get("price", 0.0)),
        p2p=entry.get("p2p", True),
        assumed=assumed,
        fp32_matrices=family.get("fp32_matrices", False),
    )


def _unstated(entry: Table) -> tuple[Assumed, ...]:
    """What of a row is assumed: fields that it says no source states, and a cache that it does not have."""
    own = tuple(
        Assumed(field, f"{entry[field]}, which no source states", field, SPREADS[field])
        for field in entry.get("assumed", ())
    )
    if "l2" in entry:
        return own
    usual = families()[entry["family"]]["l2"]
    return (*own, Assumed("l2", f"{usual}, as most of {entry['family']}", "l2", SPREADS["l2"]))


def assumed_notes(name: str, assumed: tuple[Assumed, ...]) -> tuple[str, ...]:
    """What a result says of assumed figures."""
    if not assumed:
        return ()
    fields = ", ".join(entry.field for entry in assumed)
    return (f"{name}: {fields} assumed, not read off a data sheet (clustersim check says how far that may be off)",)


NEEDED = ("family", "peak", "memory", "bandwidth", "sms", "tdp_w", "source")
"""Fields that an entry of ``data/devices.toml``, or one that it is like, must have."""
UNKNOWN = "other"
"""The family of a GPU of a generation that nobody measured."""


def _si(value: str | float, parse: Callable[[str], float]) -> float:
    return parse(value) if isinstance(value, str) else float(value)


def _inherit(name: str, table: Table) -> Table:
    """The entry with the fields of the part it is ``like``; aliases are its own."""
    entry: Table = table[name]
    if "like" not in entry:
        return entry
    parent = _inherit(entry["like"], table)
    matmul = {**parent.get("matmul", {}), **entry.get("matmul", {})}
    return {**parent, "aliases": (), **entry, "matmul": matmul}


def _whole_entry(name: str, table: Table) -> Table:
    """The entry with what it is like. Raises :class:`TopologyError` where it lacks a field that has no default."""
    entry = _inherit(name, table)
    if missing := [field for field in NEEDED if field not in entry]:
        raise TopologyError(f"data/devices.toml: missing {' and '.join(missing)} (at $.device.{name})")
    return entry


def _figure(pair: list[Any]) -> SourcedFigure:
    value, source = pair
    return SourcedFigure(float(value), source, estimated=source.startswith("estimated"))


def _rates(table: dict[str, list[float]], peak: float) -> Mapping[int, FlashRate]:
    return MappingProxyType({int(dim): FlashRate(peak * r, causal, full) for dim, (r, causal, full) in table.items()})
