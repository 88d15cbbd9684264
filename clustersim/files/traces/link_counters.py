"""Counters of NICs and GPUs as Prometheus' exporters write them (its text format, a file per machine).

Of each InfiniBand port: whether it is up (``state_id`` 4 is active, 1 is down), at which rate it has trained, how often
its link went down, what it sent and received, and for how long it had something to send and could not. Names of
node_exporter's infiniband collector. Of each GPU its clock, its temperature, rows of memory that it remapped and the
last Xid: names of NVIDIA's dcgm-exporter.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from clustersim.core.errors import TraceError
from clustersim.core.texts import short
from clustersim.core.units import format_bandwidth
from clustersim.files import slices
from clustersim.files.traces import files
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.told import GpuCounters, LinkCounters, NicPort

PREFIX = "node_infiniband_"
ACTIVE = 4
DOWN = 1
FIELDS = {
    "state_id": "state",
    "rate_bytes_per_second": "rate",
    "link_downed_total": "downs",
    "port_data_transmitted_bytes_total": "sent",
    "port_data_received_bytes_total": "received",
    "port_transmit_wait_total": "waited",
}
"""Names of node_exporter's metrics -> fields of :class:`clustersim.files.traces.told.NicPort`."""
_SAMPLE = re.compile(
    r'^node_infiniband_(\w+)\{device="([\w.-]{1,80})",port="(\d{1,3})"\} '
    r"([+-]?(?:\d+\.?\d*(?:[eE][+-]?\d{1,3})?|Inf|NaN))(?: \d{1,20})?\s*$",
    re.M,
)
GPU_PREFIX = "DCGM_FI_DEV_"
GPU_FIELDS = {
    "SM_CLOCK": "clock",
    "GPU_TEMP": "temperature",
    "UNCORRECTABLE_REMAPPED_ROWS": "remapped",
    "XID_ERRORS": "xid",
}
"""Names of dcgm-exporter's metrics -> fields of :class:`clustersim.files.traces.told.GpuCounters`."""
_GPU_SAMPLE = re.compile(
    r'^DCGM_FI_DEV_(\w+)\{gpu="(\d{1,4})"(?:[^}\n]*?\b[Hh]ostname="([^"\n]{1,200})")?[^}\n]*\} '
    r"([+-]?\d+\.?\d*(?:[eE][+-]?\d{1,3})?)(?: \d{1,20})?\s*$",
    re.M,
)
_HOST = re.compile(r'^node_uname_info\{[^}\n]*nodename="([^"\n]{1,200})"', re.M)
SLOWER_CLOCK = 0.95
HOTTER = 12.0
"""Share of the usual clock below which a GPU is told, and how many degrees above the others."""
SLOWER = 0.95
"""Share of the usual rate of the ports below which one has trained to fewer lanes or a lower speed."""


def sniff(head: Head) -> Likeness:
    """Whether this is a page of metrics with InfiniBand's or GPUs' among them."""
    named = PREFIX in head.text or GPU_PREFIX in head.text
    shaped = named and bool(_SAMPLE.search(head.text) or _GPU_SAMPLE.search(head.text))
    return likeness(named=named, shaped=shaped)


def read(paths: Sequence[Path]) -> LinkCounters:
    """What the ports and GPUs of these machines count. Raises :class:`TraceError` for a page without any, or without a
    port's state or rate."""
    ports: list[NicPort] = []
    gpus: list[GpuCounters] = []
    for path in paths:
        text = files.text(path)
        host = match[1] if (match := _HOST.search(text)) else path.stem
        own_ports = list(_ports_of(path, text, host))
        own_gpus = list(_gpus_of(path, text, host))
        if not (own_ports or own_gpus):
            raise TraceError(
                f"{path}: no port of InfiniBand and no GPU; node_exporter's infiniband collector and dcgm-exporter "
                "write them"
            )
        ports += own_ports
        gpus += own_gpus
    source = ", ".join(map(str, paths))
    return LinkCounters(source, [*_lines(ports), *_gpu_lines(gpus)], ports, gpus=gpus)


def _ports_of(path: Path, text: str, host: str) -> Iterator[NicPort]:
    values: defaultdict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for match in _SAMPLE.finditer(text):
        if match[1] in FIELDS:
            values[match[2], int(match[3])][FIELDS[match[1]]] = _finite(path, match)
    for (device, port), fields in sorted(values.items()):
        if not {"state", "rate"} <= fields.keys():
            raise TraceError(f"{path}: {device}:{port} has no state_id or no rate_bytes_per_second")
        state, downs = int(fields.pop("state")), int(fields.pop("downs", 0))
        flows = {"sent": 0.0, "received": 0.0, **fields}
        yield NicPort(host, device, port, state, downs=downs, **flows)


def _finite(path: Path, match: re.Match[str]) -> float:
    """The value of a sample. Raises :class:`TraceError` for one without end."""
    value = float(match[4])
    if not math.isfinite(value):
        raise TraceError(f"{path}: {match[1]} is {short(match[4])}, which no counter is")
    return value


def _gpus_of(path: Path, text: str, host: str) -> Iterator[GpuCounters]:
    values: defaultdict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for match in _GPU_SAMPLE.finditer(text):
        if match[1] in GPU_FIELDS:
            values[match[3] or host, int(match[2])][GPU_FIELDS[match[1]]] = _finite(path, match)
    for (name, gpu), fields in sorted(values.items()):
        remapped, xid = (int(fields.get(key, 0)) for key in ("remapped", "xid"))
        yield GpuCounters(name, gpu, fields.get("clock", 0.0), fields.get("temperature", 0.0), remapped, xid)


def slow_ports(ports: Sequence[NicPort]) -> list[NicPort]:
    """Ports that are up at a lower rate than most."""
    usual = median(port.rate for port in ports) if ports else 0.0
    return [port for port in ports if port.state == ACTIVE and port.rate < SLOWER * usual]


def _lines(ports: Sequence[NicPort]) -> Iterator[str]:
    odd = 0
    for port in ports:
        if port.state != ACTIVE:
            odd += 1
            yield f"{port.name} is down (state {port.state}); its link went down {port.downs} time(s)"
        elif port.downs:
            odd += 1
            yield f"{port.name}: its link went down {port.downs} time(s), and is up now"
    for port in slow_ports(ports):
        odd += 1
        usual = format_bandwidth(median(each.rate for each in ports))
        yield f"{port.name} runs at {format_bandwidth(port.rate)}, most at {usual}: it has trained lower"
    if ports and not odd:
        yield f"all {len(ports)} ports are up, at one rate, and none went down"


def slow_gpus(gpus: Sequence[GpuCounters]) -> list[GpuCounters]:
    """GPUs whose SMs run at a lower clock than most."""
    usual = median(gpu.clock for gpu in gpus) if gpus else 0.0
    return [gpu for gpu in gpus if 0 < gpu.clock < SLOWER_CLOCK * usual]


def hot_gpus(gpus: Sequence[GpuCounters]) -> list[GpuCounters]:
    """GPUs that are much hotter than most."""
    usual = median(gpu.temperature for gpu in gpus) if gpus else 0.0
    return [gpu for gpu in gpus if gpu.temperature > usual + HOTTER]


def _gpu_lines(gpus: Sequence[GpuCounters]) -> Iterator[str]:
    slow = slow_gpus(gpus)
    hot = hot_gpus(gpus)
    for gpu in gpus:
        if gpu in slow or gpu in hot:
            yield f"{gpu.name} runs at {gpu.clock:.0f} MHz and {gpu.temperature:.0f} deg C"
        if gpu.remapped or gpu.xid:
            yield f"{gpu.name} has remapped {gpu.remapped} row(s) of its memory; its last Xid is {gpu.xid or 'none'}"
    if gpus and not (slow or hot or any(gpu.remapped or gpu.xid for gpu in gpus)):
        yield f"all {len(gpus)} GPUs run alike, and none has mended its memory"


def write_gpus(gpus: Sequence[GpuCounters], folder: Path) -> list[Path]:
    """Write ``HOST_gpus.prom`` of each machine; returns the files. Raises :class:`TraceError` where one cannot be
    written."""
    paths = []
    for host in dict.fromkeys(gpu.host for gpu in gpus):
        lines = []
        for metric, name in GPU_FIELDS.items():
            lines.append(f"# TYPE {GPU_PREFIX}{metric} gauge")
            for gpu in gpus:
                if gpu.host == host:
                    labels = f'gpu="{gpu.gpu}",device="nvidia{gpu.gpu}",Hostname="{host}"'
                    lines.append(f"{GPU_PREFIX}{metric}{{{labels}}} {getattr(gpu, name):.9g}")
        path = folder / f"{host}_gpus.prom"
        slices.replace_file(path, ("\n".join(lines) + "\n").encode())
        paths.append(path)
    return paths


def write_counters(ports: Sequence[NicPort], folder: Path) -> list[Path]:
    """Write ``HOST.prom`` of each machine; returns the files.

    Raises :class:`TraceError` where one cannot be written.
    """
    by_host: defaultdict[str, list[NicPort]] = defaultdict(list)
    for port in ports:
        by_host[port.host].append(port)
    paths = []
    for host, of_host in by_host.items():
        path = folder / f"{host}.prom"
        slices.replace_file(path, _page(host, of_host).encode())
        paths.append(path)
    return paths


def _page(host: str, ports: Sequence[NicPort]) -> str:
    lines = [f'node_uname_info{{machine="x86_64",nodename="{host}",sysname="Linux"}} 1']
    for metric, name in FIELDS.items():
        lines.append(f"# TYPE {PREFIX}{metric} {'counter' if metric.endswith('_total') else 'gauge'}")
        for port in ports:
            lines.append(f'{PREFIX}{metric}{{device="{port.device}",port="{port.port}"}} {_number(port, name)}')
    return "\n".join(lines) + "\n"


def _number(port: NicPort, name: str) -> str:
    values: Mapping[str, float] = {field: getattr(port, field) for field in FIELDS.values()}
    return f"{values[name]:.9g}"
