"""nccl-tests' ``-J`` report: its settings, and a list of results by size."""

from __future__ import annotations

from pathlib import Path

import msgspec

from clustersim.core.errors import TraceError
from clustersim.core.texts import Table
from clustersim.files.traces import files
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.nccl_tests_guess import guessed
from clustersim.files.traces.nccl_tests_run import OF_CPU, PROGRAM, NcclTestsRun, number_of, version_text
from clustersim.files.traces.samples import Sample, Samples, SampleSieve, dtype_of, kind_of


def sniff(head: Head) -> Likeness:
    """Whether this is nccl-tests' ``-J`` report."""
    named = {"nccl_version", "args"} <= head.members.keys() or {"config", "results"} <= head.members.keys()
    return likeness(named=named, shaped=head.holds("config") and head.lists("results", "size", "type"))


def read(path: Path) -> Samples:
    """A ``-J`` report. Raises :class:`TraceError` for one that is cut off."""
    try:
        report = msgspec.json.decode(files.whole(path))
        run = _reported(report)
        results = report["results"]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not a whole nccl-tests -J report: {error}") from None
    sieve = SampleSieve()
    for number, cells in enumerate(results if isinstance(results, list) else []):
        if isinstance(cells, dict):
            _row_of_report(cells, run, sieve, f"{path} results[{number}]", str(path))
    return sieve.done(str(path))


def _reported(report: Table) -> NcclTestsRun:
    """What a report says of its run."""
    config = report["config"]
    run = NcclTestsRun(threads=int(config.get("nthreads", 1)), gpus=int(config.get("ngpus", 1)))
    run.version = version_text(int(report.get("nccl_version", 0)))
    run.env = dict(str(entry).partition("=")[::2] for entry in report.get("env", []))
    devices = {int(device.get("rank")): device for device in config.get("devices", [])}
    own = max(run.threads * run.gpus, 1)
    # A process that drives several GPUs writes the first of them alone (src/util.cu, writeDeviceReport, 2.17 to 2.20).
    first_alone = own if devices and not any(rank % own for rank in devices) else 1
    for first, device in devices.items():
        for rank in map(str, range(first, first + first_alone)):
            run.hosts[rank] = f"{device.get('hostname')}\t{device.get('device_info', '')}"
            run.groups[rank] = str(device.get("group", 0))
    named = [match.group(1) for word in report.get("args", []) if (match := PROGRAM.search(str(word)))]
    run.kind = kind_of(named[0]) if named else None
    return run


def _row_of_report(cells: Table, run: NcclTestsRun, sieve: SampleSieve, source: str, case: str) -> None:
    places = {name: timed for name in ("out_of_place", "in_place") if isinstance(timed := cells.get(name), dict)}

    def seconds(place: str) -> float:
        """Seconds in place or out of place; NaN where it was not measured."""
        return number_of(str(places.get(place, {}).get("time", "nan"))) * 1e-6

    cells_of = {name: [str(cells.get(name, ""))] for name in ("size", "count", "type", "redop", "root")}
    timed = places.get("out_of_place") or places.get("in_place") or {}
    cells_of |= {"algbw": [str(timed.get("alg_bw", ""))], "busbw": [str(timed.get("bus_bw", ""))]}
    ranks, nodes = run.members()
    kind = kind_of(str(cells.get("experiment_name", ""))) or run.kind
    guess = guessed([cells_of], ranks) if kind is None else None
    kind = guess.kind if guess is not None else kind
    if number_of(str(timed.get("nwrong"))) > 0:
        return sieve.skip("a row whose results nccl-tests found wrong")
    dtype = dtype_of(cells_of["type"][0])
    if "cpu_time" in timed and "time" not in timed:
        return sieve.skip(OF_CPU)
    if kind is None or dtype is None:
        return sieve.skip("a collective or element type the report does not name")
    out = seconds("out_of_place")
    within = seconds("in_place")
    row = Sample(
        kind=kind,
        nbytes=number_of(cells_of["size"][0]),
        seconds=out if out == out else within,
        ranks=ranks,
        dtype=dtype,
        redop=cells_of["redop"][0].replace("none", ""),
        nodes=nodes,
        seconds_in_place=within,
        launch=run.launch,
        version=run.version,
        env=run.settings,
        device=run.device,
        source=source,
        case=f"{case} {kind}",
    )
    return sieve.add(row, number_of(str(timed.get("bus_bw", "nan"))) * 1e9)
