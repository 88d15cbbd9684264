"""What a run costs and draws: prices and power as data with sources, and what follows for tokens, days and budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from clustersim.core.device import Device, device, devices
from clustersim.core.errors import TopologyError
from clustersim.core.texts import data_table
from clustersim.core.units import DAY as DAY
from clustersim.core.units import HOUR as HOUR


@dataclass(frozen=True)
class Power:
    """Draw of a GPU in each state, as shares of its power limit, and what comes on top.

    Parameters
    ----------
    compute, communication, idle : while kernels run, while only transfers run, while it waits for anything else.
    rest_of_machine : CPUs, NICs, fans and losses of the machine per GPU, all the time.
    pue : what the building draws over what the machines draw.
    """

    compute: float = 1.0
    communication: float = 0.5
    idle: float = 0.15
    rest_of_machine: float = 0.5
    pue: float = 1.2


@dataclass(frozen=True)
class GpuRates:
    """What is assumed of one kind of GPU.

    Parameters
    ----------
    usd_per_gpu_hour : None where nobody says. limit_w : its power limit [W]. power : shares of that.
    sources : of each of these, in words.
    """

    usd_per_gpu_hour: float | None
    limit_w: float
    power: Power
    sources: Mapping[str, str] = field(default_factory=dict)


def rates(
    name: str,
    usd_per_gpu_hour: float | None = None,
    power: Mapping[str, float] | None = None,
    own_gpus: Mapping[str, Device] | None = None,
) -> GpuRates:
    """What is assumed of a device; the caller's own numbers go before the shipped ones.

    ``name`` : of one device, or ``"A and B"`` of a mixed cluster, which has no price of its own and the highest of
    their power limits. ``own_gpus`` : by name, those that files describe. Raises
    :class:`clustersim.core.errors.TopologyError` for an unknown device.
    """
    gpu_files = own_gpus or {}
    data = data_table("economics")
    gpus = [gpu_files.get(part) or device(part) for part in name.split(" and ")]
    gpu = max(gpus, key=lambda gpu_sheet: gpu_sheet.tdp)
    price = data["price"].get(gpu.name) if len(gpus) == 1 else None
    if len(gpus) == 1 and gpu.usd_per_gpu_hour:
        price = {"usd_per_gpu_hour": gpu.usd_per_gpu_hour, "source": f"file of {gpu.name}", "date": "its own"}
    shares = {k: v for k, v in data["power"].items() if not k.endswith("_source")}
    sources = {k.removesuffix("_source"): v for k, v in data["power"].items() if k.endswith("_source")}
    own = dict(power or {})
    sources |= dict.fromkeys(own, "the plan's own") | {"power limit": f"data sheet of {gpu.name}"}
    if usd_per_gpu_hour is not None:
        sources["price"] = "the plan's own"
    elif price is not None:
        usd_per_gpu_hour = float(price["usd_per_gpu_hour"])
        sources["price"] = f"{price['source']}, list of {price['date']}; prices fall, give your own"
    return GpuRates(usd_per_gpu_hour, gpu.tdp, Power(**(shares | own)), sources)


UNKNOWN_LIMIT = 700.0
"""Power limit [W] taken for a GPU of which only the name is known: that of most training GPUs of 2022 to 2025."""


def rates_by_name(name: str) -> GpuRates:
    """:func:`rates` where only a name is left, as in the rows of a sweep; of a GPU that a file described there is no
    price, and its power limit is assumed."""
    try:
        return rates(name)
    except TopologyError:
        limit = f"assumed, {UNKNOWN_LIMIT:.0f} W: {name} is not a shipped device"
        usual = rates(next(iter(devices())))
        return GpuRates(None, UNKNOWN_LIMIT, usual.power, {**usual.sources, "power limit": limit})


def watts_per_gpu(rates: GpuRates, step_s: float, compute_s: float, exposed_s: float) -> float:
    """Mean draw [W] per GPU over a step, the machine and the building included.

    Parameters
    ----------
    step_s : [s]. compute_s : kernels run. exposed_s : only communication does, or waits for peers. The rest is idle.
    """
    idle_s = max(0.0, step_s - compute_s - exposed_s)
    p = rates.power
    busy = (p.compute * compute_s + p.communication * exposed_s + p.idle * idle_s) / step_s
    return rates.limit_w * (busy + p.rest_of_machine) * p.pue


class RunningCosts(msgspec.Struct, frozen=True):
    """Of a steady run: USD an hour and per sample (or token; None without a price), mean draw, and kWh per sample."""

    usd_per_hour: float | None
    usd_per_sample: float | None
    watts_per_gpu: float
    kwh_per_sample: float


def costs(rates: GpuRates, gpus: int, samples_per_s: float, watts: float) -> RunningCosts:
    """Of a machine that makes ``samples_per_s`` (tokens where a model has them); ``watts`` : of each GPU, as of
    :func:`watts_per_gpu`."""
    per_hour = None if rates.usd_per_gpu_hour is None else rates.usd_per_gpu_hour * gpus
    per_sample = None if per_hour is None else per_hour / HOUR / samples_per_s
    return RunningCosts(per_hour, per_sample, watts, watts * gpus / samples_per_s / 3.6e6)
