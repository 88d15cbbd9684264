"""Counters of NICs as Prometheus' node exporter writes them for InfiniBand (its text format, a file per machine).

Of each port: whether it is up (``state_id`` 4 is active, 1 is down), at which rate it has trained, how often its link
went down, and what it sent and received. Names of node_exporter's infiniband collector.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from clustersim.core.errors import TraceError
from clustersim.core.units import format_bandwidth
from clustersim.files.traces import base, files
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.told import LinkCounters, NicPort

PREFIX = "node_infiniband_"
ACTIVE = 4
DOWN = 1
FIELDS = {
    "state_id": "state",
    "rate_bytes_per_second": "rate",
    "link_downed_total": "downs",
    "port_data_transmitted_bytes_total": "sent",
    "port_data_received_bytes_total": "received",
}
"""Names of node_exporter's metrics -> fields of :class:`clustersim.files.traces.told.NicPort`."""
_SAMPLE = re.compile(
    r'^node_infiniband_(\w+)\{device="([\w.-]{1,80})",port="(\d{1,3})"\} '
    r"([+-]?(?:\d+\.?\d*(?:[eE][+-]?\d{1,3})?|Inf|NaN))(?: \d{1,20})?\s*$",
    re.M,
)
_HOST = re.compile(r'^node_uname_info\{[^}\n]*nodename="([^"\n]{1,200})"', re.M)
SLOWER = 0.95
"""Share of the usual rate of the ports below which one has trained to fewer lanes or a lower speed."""


def sniff(head: Head) -> Likeness:
    """Whether this is a page of metrics with InfiniBand's among them."""
    named = PREFIX in head.text
    return likeness(named=named, shaped=named and bool(_SAMPLE.search(head.text)))


def read(paths: Sequence[Path]) -> LinkCounters:
    """What the ports of these machines count. Raises :class:`TraceError` for a page without a port's state or rate."""
    ports: list[NicPort] = []
    for path in paths:
        text = files.text(path)
        host = match[1] if (match := _HOST.search(text)) else path.stem
        values: defaultdict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        for match in _SAMPLE.finditer(text):
            if match[1] in FIELDS:
                values[match[2], int(match[3])][FIELDS[match[1]]] = float(match[4])
        if not values:
            raise TraceError(f"{path}: no port of InfiniBand; node_exporter's infiniband collector writes them")
        for (device, port), said in sorted(values.items()):
            if not {"state", "rate"} <= said.keys():
                raise TraceError(f"{path}: {device}:{port} has no state_id or no rate_bytes_per_second")
            ports.append(
                NicPort(
                    host=host,
                    device=device,
                    port=port,
                    state=int(said["state"]),
                    rate=said["rate"],
                    downs=int(said.get("downs", 0)),
                    sent=said.get("sent", 0.0),
                    received=said.get("received", 0.0),
                )
            )
    source = ", ".join(map(str, paths))
    return LinkCounters(source, list(_lines(ports)), ports)


def slow_ports(ports: Sequence[NicPort]) -> list[NicPort]:
    """Ports that are up at a lower rate than most."""
    usual = median(port.rate for port in ports)
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
    if not odd:
        yield f"all {len(ports)} ports are up, at one rate, and none went down"


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
        base.replace_file(path, _page(host, of_host).encode())
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
