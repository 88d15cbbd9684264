"""``clustersim calibrate``: constants of a machine from its own measurements, written as a topology file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from clustersim.app.cli.common import OUT_FILE, OUT_FOLDER, PATH, format_option, json_option, print_json, working
from clustersim.app.cli.pictures import write_picture
from clustersim.app.cli.tables import rich_table, stdout
from clustersim.core.errors import ClusterSimError
from clustersim.core.measured_spans import MeasuredSpan, missing_words, span_words
from clustersim.core.outputs import fresh, ours, output_folder, writing
from clustersim.core.units import format_bandwidth, format_bytes, format_time

if TYPE_CHECKING:
    from clustersim.calibrate.fit.calibrated import Calibrated
    from clustersim.calibrate.fit.solve import FitResult
    from clustersim.core.arrays import Bools


@click.command(short_help="Fit a machine's constants to its measurements.")
@click.argument("data", nargs=-1, required=True, type=PATH)
@click.option("--topology", required=True, help="How the machine is built: a shipped topology, or a file.")
@click.option("-o", "--out", type=OUT_FILE, required=True, help="The topology file to write.")
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes of runs whose log does not say.  [as ranks need]")
@click.option("--plots", type=OUT_FOLDER, help="A folder to draw the errors in.")
@format_option
@json_option
def calibrate(
    data: tuple[Path, ...],
    topology: str,
    out: Path,
    nodes: int | None,
    plots: Path | None,
    fmt: str | None,
    as_json: bool,
) -> None:
    """Fit the constants of the time models to DATA of one machine, and write a topology file that carries them. DATA
    are folders that clustersim capture wrote, or nccl-tests logs and tables in the columns of nccl_tests.csv."""
    from clustersim.calibrate.fit.calibrated import MARK, topology_text

    if out.suffix != ".toml":
        raise ClusterSimError(f"-o {out}: a topology file ends with .toml")
    ours(out, MARK.encode())
    with working(f"fitting {', '.join(map(str, data))}"):
        calibrated = _fitted(data, topology, datetime.now(UTC).date().isoformat(), nodes, fmt)
    base = os.path.relpath(topology, out.parent) if Path(topology).is_file() else topology
    with writing(out), fresh(out) as file:
        file.write_text(topology_text(calibrated, out.stem, base), encoding="utf-8")
    if plots is not None:
        _draw(calibrated, plots)
    if as_json:
        print_json(msgspec.to_builtins(_said(calibrated)))
    else:
        _print(calibrated)
        click.echo(str(out))


def _fitted(data: tuple[Path, ...], topology: str, date: str, nodes: int | None, fmt: str | None) -> Calibrated:
    """From captures, or from logs."""
    from clustersim.calibrate.fit.of_capture import calibrate_captures
    from clustersim.calibrate.fit.of_logs import calibrate_logs
    from clustersim.files.traces import FORMATS, files, sniff

    if fmt is None:
        captured = [all(sniff(file) is FORMATS["capture"] for file in files.files_of(path)) for path in data]
    else:
        captured = [fmt == "capture"] * len(data)
    if all(captured):
        return calibrate_captures(data, topology, date)
    if any(captured):
        raise ClusterSimError(
            f"{data[captured.index(True)]} is a capture, {data[captured.index(False)]} is none; "
            "calibrate one kind at a time"
        )
    return calibrate_logs(data, topology, date, nodes, fmt)


def _draw(calibrated: Calibrated, folder: Path) -> None:
    """One picture for each part: predicted against measured, and errors by size before and after."""
    import numpy as np

    from clustersim.app import plots
    from clustersim.core.ranges import size_class

    with output_folder(folder):
        for fit in calibrated.fits:
            classes = (
                [size_class(s) for s in calibrated.sizes] if fit.part == "nccl" else [fit.part] * len(fit.measured)
            )
            parts = [f"{word}: {name}" for word in ("before", "after") for name in classes]
            times = np.concatenate([fit.before, fit.after])
            figure = plots.accuracy(np.tile(fit.measured, 2), times, parts, part_name="size")
            click.echo(write_picture(figure, folder / f"{fit.part}.png"), err=True)


NOT_WRITTEN = "a topology file has no field for it: without it, constants are fitted to the file's machine"
"""Of a setting of NCCL's."""


NOT_MEASURED = (
    "Sizes that a collective was not measured at stay as shipped, and all of these keep the range of a machine that "
    "nobody calibrated"
)
"""Of what a log has not."""


class FitErrors(msgspec.Struct, frozen=True):
    """Median |relative error| of some rows, before and after a fit."""

    rows: int
    before: float
    after: float


class ConstantEstimate(msgspec.Struct, frozen=True):
    """A constant of a part: its value with the 95 % interval, and why it keeps its default; empty where it does not."""

    part: str
    name: str
    value: float
    low: float
    high: float
    default: float
    refused: str


class CalibrationReport(msgspec.Struct, frozen=True):
    """What a calibration says: ``errors`` by part, of NCCL also ``by_size``; ``held_out``, the median error of rows
    predicted from the other half of the sizes of ``held_out_of``; rows ``skipped``, by reason; the ``share`` of the way
    that constants were moved, where a size class would else be predicted worse. explained : how the machine differs
    from its file, with the median error of rows above 64 KiB as it is ``described`` and so; ``written`` to the
    topology file; ``alike``, what explains the rows as well. unexplained :
    sentences on sizes that are far off as the file describes the machine, and why is not known. measured : of NCCL's
    collectives, what the rows are of; ``missing``, what they are not of. doubts : what logs do
    not say and what is taken instead, and where they contradict each other."""

    constants: list[ConstantEstimate]
    errors: dict[str, FitErrors]
    by_size: dict[str, FitErrors]
    held_out_of: str
    held_out: float | None
    noise: float
    skipped: Mapping[str, int]
    share: float = 1.0
    explained: str = ""
    described: float = 0.0
    error: float = 0.0
    written: bool = True
    alike: tuple[str, ...] = ()
    unexplained: tuple[str, ...] = ()
    measured: tuple[MeasuredSpan, ...] = ()
    missing: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def _said(calibrated: Calibrated) -> CalibrationReport:
    import numpy as np

    spans = calibrated.calibration.provenance.spans
    return CalibrationReport(
        constants=[
            ConstantEstimate(fit.part, c.knob.name, c.value, c.low, c.high, c.knob.default, c.refused)
            for fit in calibrated.fits
            for c in fit.constants
        ],
        errors={fit.part: _errors(fit, slice(None)) for fit in calibrated.fits},
        by_size=_by_size(calibrated),
        held_out_of=calibrated.fits[0].part,
        held_out=float(np.median(calibrated.held_out)) if len(calibrated.held_out) else None,
        noise=calibrated.noise,
        skipped=calibrated.skipped,
        share=min(fit.share for fit in calibrated.fits),
        measured=spans,
        missing=tuple(missing_words(spans)) if spans else (),
        doubts=calibrated.doubts,
        **_explanation(calibrated),
    )


def _explanation(calibrated: Calibrated) -> dict[str, Any]:
    """Fields of the report."""
    from clustersim.calibrate.fit.structures import unexplained
    from clustersim.core.ranges import size_class

    reason = calibrated.explained
    if reason is None:
        fit = calibrated.fits[0]
        classes = [size_class(size) for size in calibrated.sizes] if fit.part == "nccl" else []
        if not classes:
            return {}
        return {"unexplained": tuple(unexplained(classes, fit.measured, fit.before, calibrated.tried, fit.after))}
    return {
        "explained": reason.structure.words,
        "described": reason.described,
        "error": reason.error,
        "written": reason.written,
        "alike": reason.alike,
    }


def _by_size(calibrated: Calibrated) -> dict[str, FitErrors]:
    """Of NCCL's rows."""
    import numpy as np

    from clustersim.core.ranges import size_class

    out: dict[str, FitErrors] = {}
    for fit in calibrated.fits:
        classes = np.array([size_class(size) for size in calibrated.sizes]) if fit.part == "nccl" else np.empty(0)
        for name in sorted(set(classes.tolist()), key=lambda name: float(calibrated.sizes[classes == name].min())):
            out[name] = _errors(fit, classes == name)
    return out


def _errors(fit: FitResult, rows: Bools | slice) -> FitErrors:
    import numpy as np

    measured = fit.measured[rows]
    before, after = (float(np.median(np.abs(times[rows] / measured - 1.0))) for times in (fit.before, fit.after))
    return FitErrors(len(measured), before, after)


def _print(calibrated: Calibrated) -> None:
    from clustersim.calibrate.fit.solve import UNUSED

    report = _said(calibrated)
    heads = ("part", "constant", "default", "fitted", "95 % interval", "kept, because")
    unused = [constant for constant in report.constants if constant.refused == UNUSED]
    rows = (_cells(constant) for constant in report.constants if constant.refused != UNUSED)
    stdout().print(rich_table("constants", ((name, 2 <= i < 5) for i, name in enumerate(heads)), rows))
    if unused:
        click.echo(f"{len(unused)} constants keep their defaults, as {UNUSED.removesuffix('it')}them")
    for line in _lines(report):
        click.echo(line)
    for reason, count in report.skipped.items():
        click.echo(f"skipped {count}: {reason}")


def _cells(constant: ConstantEstimate) -> Iterator[str]:
    from clustersim.core.calibrated import unit_of

    formats: dict[str, Callable[[float], str]] = {"s": format_time, "B/s": format_bandwidth, "B": format_bytes}
    show = formats.get(unit_of(constant.part, constant.name), "{:.3g}".format)
    yield from (constant.part, constant.name, show(constant.default))
    if constant.refused:
        yield from ("", "", constant.refused)
    else:
        yield from (show(constant.value), f"{show(constant.low)} to {show(constant.high)}", "")


def _lines(report: CalibrationReport) -> Iterator[str]:
    from clustersim.calibrate.fit.structures import alike_words, reason_words

    yield from (f"note: {sentence}" for sentence in report.doubts)
    if report.explained:
        outcome = "it is written, and constants are fitted beside it" if report.written else NOT_WRITTEN
        yield f"{reason_words(report.explained, report.described, report.error)}; {outcome}"
        yield from alike_words(report.alike)
    yield from report.unexplained
    for part, error in report.errors.items():
        yield f"{part}: {error.rows} rows, median |error| {error.before:.1%} before and {error.after:.1%} after"
    for name, error in report.by_size.items():
        yield f"  {name}: {error.rows} rows, {error.before:.1%} before and {error.after:.1%} after"
    if report.share < 1:
        how = f"moved {report.share:.0%} of the way" if report.share else "left as they are"
        yield f"constants are {how}: where all rows together would have them, a size class would be predicted worse"
    if report.held_out is not None:
        beside = f"; repeats of a row differ by {report.noise:.1%}" if report.noise == report.noise else ""
        held_out = f"median |error| {report.held_out:.1%}{beside}"
        yield f"{report.held_out_of}, every other size fitted and those between predicted: {held_out}"
    yield from (f"measured: {line}" for line in span_words(report.measured))
    if report.missing:
        yield f"not measured: {'; '.join(report.missing)}. {NOT_MEASURED}"
