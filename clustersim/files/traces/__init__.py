"""Files <-> Timeline, Samples or what a log tells. A format is a row: how to know it by content, read it, write it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from clustersim.core.errors import TraceError, nearest
from clustersim.core.row_table import RowTable
from clustersim.core.timeline import Timeline
from clustersim.files import chrome_trace
from clustersim.files.traces import (
    captured,
    deepspeed,
    files,
    flight_recorder,
    ib_ports,
    json_lines,
    kernel_csv,
    kineto,
    link_counters,
    nccl_debug,
    nccl_tests_json,
    nccl_tests_log,
    nsys,
    pftrace,
    pipeline_csv,
    saved,
    spans_csv,
    step_tables,
    step_timers,
    tables,
    tensorboard,
    unread,
    watchdog,
)
from clustersim.files.traces.heads import Head, Likeness, growing
from clustersim.files.traces.profiled import backend_of
from clustersim.files.traces.samples import Sample, Samples, joined
from clustersim.files.traces.told import Told

__all__ = ["FORMATS", "Format", "Sample", "Samples", "Told", "backend_of", "read", "sniff", "write"]


@dataclass(frozen=True)
class Format:
    """A trace format.

    Parameters
    ----------
    name : str, as ``--format`` takes it. what : in words, for messages. of : whose, and of which releases.
    suffixes : ends of names it is written to. write : ``(timeline, path, ranks) -> ranks written``; None: not written.
    takes_memory : ``write`` also takes ``memory``, bytes held while an op of that name runs, for a counter.
    sniff : how much a file's head looks like this format.
    read : ``paths -> Timeline, Samples or Told``. None: not read.
    """

    name: str
    what: str
    of: str = ""
    suffixes: tuple[str, ...] = ()
    write: Callable[..., tuple[int, ...]] | None = None
    takes_memory: bool = False
    sniff: Callable[[Head], Likeness] | None = None
    read: Callable[[Sequence[Path]], Timeline | Samples | Told] | None = None


def _each(read_one: Callable[[Path], Samples]) -> Callable[[Sequence[Path]], Samples]:
    return lambda paths: joined(map(read_one, paths))


_ROWS = (
    Format(
        "hta",
        "Chrome JSON for HolisticTraceAnalysis",
        suffixes=(".hta.json", ".hta.json.gz"),
        write=chrome_trace.write_hta_trace,
    ),
    Format(
        "chrome",
        "Chrome JSON",
        suffixes=(".json", ".json.gz"),
        write=chrome_trace.write_chrome_trace,
        takes_memory=True,
    ),
    Format(
        "pftrace",
        "Perfetto protobuf",
        suffixes=(".pftrace", ".perfetto-trace"),
        write=pftrace.write_pftrace,
        takes_memory=True,
    ),
    Format("csv", "CSV of spans", suffixes=(".csv", ".csv.gz"), write=spans_csv.write_csv),
    Format("run", "saved run", "`--out` of this program", sniff=saved.sniff, read=saved.read),
    Format("capture", "clustersim capture", "`clustersim capture`", sniff=captured.sniff, read=captured.read),
    Format(
        "nsys",
        "Nsight Systems export",
        "`nsys export --type sqlite`, or parquetdir",
        sniff=nsys.sniff,
        read=nsys.read,
    ),
    Format(
        "kernel_csv",
        "CSV of kernels of a GPU profiler",
        "Nsight Systems' `nsys stats --report cuda_gpu_trace --format csv`, or cuda_gpu_kern_sum; rocprofv3's "
        "kernel_trace.csv and kernel_stats.csv; TraceLens' kernel_summary.csv",
        sniff=kernel_csv.sniff,
        read=kernel_csv.read,
    ),
    Format(
        "tensorboard",
        "TensorBoard event file",
        "TensorBoard's event files, of any framework that writes step times",
        sniff=tensorboard.sniff,
        read=tensorboard.read,
    ),
    Format(
        "nccl_tests_json",
        "nccl-tests -J",
        "nccl-tests 2.17, `-J`",
        sniff=nccl_tests_json.sniff,
        read=_each(nccl_tests_json.read),
    ),
    Format(
        "flight_recorder",
        "Flight Recorder dump",
        "PyTorch 2.4 to 2.13, pickle or JSON, a file a rank",
        sniff=flight_recorder.sniff,
        read=flight_recorder.read,
    ),
    Format(
        "json_lines",
        "inspector or rccl-tests JSON lines",
        "NCCL's inspector plugin; rccl-tests' JSON",
        sniff=json_lines.sniff,
        read=json_lines.read,
    ),
    Format(
        "step_table",
        "table of steps",
        "CSV, JSON lines or lists, or Parquet with a row a step: Lightning's CSVLogger, exports of Weights & Biases, "
        "scalars that TensorBoard downloads, metrics of MaxText, LitGPT, detectron2, MMEngine, a loop of one's own; "
        "trainer_state.json where TRL logs step_time",
        sniff=step_tables.sniff,
        read=step_tables.read,
    ),
    Format(
        "kineto",
        "PyTorch profiler trace",
        "PyTorch 1.8 to 2.13 on CUDA, ROCm, XPU and CPUs, with execution traces beside; gzip, cut off, lists of events",
        sniff=kineto.sniff,
        read=kineto.read,
    ),
    Format(
        "pipeline",
        "folder of ops.csv and steps.csv",
        "a folder of ops.csv and steps.csv",
        sniff=pipeline_csv.sniff,
        read=pipeline_csv.read,
    ),
    Format(
        "table",
        "CSV table of collectives",
        "a CSV with collective, bytes, ranks and time",
        sniff=tables.sniff,
        read=_each(tables.read),
    ),
    Format(
        "nccl_tests",
        "nccl-tests log",
        "nccl-tests of 2015 to 2.20, rccl-tests, behind launchers' prefixes, among NCCL's lines, in a page or a sheet",
        sniff=nccl_tests_log.sniff,
        read=_each(nccl_tests_log.read),
    ),
    Format(
        "deepspeed",
        "DeepSpeed comms log",
        "DeepSpeed's comms logger",
        sniff=deepspeed.sniff,
        read=_each(deepspeed.read),
    ),
    Format(
        "link_counters",
        "page of counters of NICs or GPUs",
        "Prometheus' node_exporter (its infiniband collector) and NVIDIA's dcgm-exporter, a page a machine",
        sniff=link_counters.sniff,
        read=link_counters.read,
    ),
    Format(
        "ib_ports",
        "list of cables of an InfiniBand network",
        "infiniband-diags' `ibnetdiscover -p`",
        sniff=ib_ports.sniff,
        read=ib_ports.read,
    ),
    Format(
        "watchdog",
        "log of PyTorch's watchdog or launcher",
        "PyTorch's NCCL watchdog, 1.13 to 2.13, and torchrun's block of what failed",
        sniff=watchdog.sniff,
        read=watchdog.read,
    ),
    Format(
        "nccl_debug", "NCCL_DEBUG=INFO log", "NCCL 2.8 to 2.29 and RCCL", sniff=nccl_debug.sniff, read=nccl_debug.read
    ),
    Format(
        "step_timers",
        "log of a training framework's steps",
        "Megatron-LM with its timers, torchtitan, nanotron, nanoGPT, NeMo 1 and 2, Composer, DeepSpeed's clocks "
        "and profiler, MaxText, LitGPT, OpenCLIP, fairseq, OLMo, verl, NeMo Automodel, ms-swift, LLaMA-Factory, timm, "
        "MMEngine, detectron2, InternEvo, PaddleNLP, TensorFlow, TRL, slime, NeMo RL, prime-rl; "
        "progress bars and last lines of Hugging Face's Trainer, Lightning, torchtune",
        sniff=step_timers.sniff,
        read=step_timers.read,
    ),
)

FORMATS = RowTable("clustersim.formats", "trace format", Format, _ROWS)
"""Every format by name; of two that a file looks like as much, the first is asked first."""


def write(
    timeline: Timeline,
    path: str | Path,
    ranks: Sequence[int] | None = None,
    memory: Mapping[str, float] | None = None,
) -> tuple[int, ...]:
    """Write a trace in the format its name ends with; returns the ranks written. Raises :class:`TraceError`.

    ``memory`` [bytes held while an op of that name runs] becomes a counter in formats that have counters.
    """
    for row in FORMATS.values():
        if row.write is not None and str(path).endswith(row.suffixes):
            more = {"memory": memory} if row.takes_memory else {}
            return row.write(timeline, path, ranks, **more)
    endings = ", ".join(suffix for row in FORMATS.values() for suffix in row.suffixes)
    raise TraceError(f"{path}: no trace format has this ending; known: {endings}")


def candidates(path: str | Path) -> list[Format]:
    """The formats that a file looks like, by its content, most like it first.

    Raises :class:`TraceError` where it looks like none that can be read.
    """
    ranked: list[tuple[Likeness, Format]] = []
    for head in growing(Path(path)):
        looks = [(row.sniff(head), row) for row in FORMATS.values() if row.sniff is not None]
        ranked = sorted(looks, key=lambda pair: -pair[0])  # stable: the table's order among equals
        if ranked[0][0] is Likeness.SHAPED:
            break
    alike = [row for how, row in ranked if how is not Likeness.NONE]
    if not alike:
        if told := unread.advice(head):
            raise TraceError(f"{path}: {told}")
        if files.is_cut(Path(path)):
            raise TraceError(f"{path}: the file is cut off, and what is there is of no format that is known")
        format_names = ", ".join(row.what for row in FORMATS.values() if row.read)
        raise TraceError(f"{path}: no format that is known by its content; can be read: {format_names}")
    return alike


def sniff(path: str | Path) -> Format:
    """The format of a file, by its content. Raises :class:`TraceError` where it is none that can be read."""
    return candidates(path)[0]


def read(paths: str | Path | Sequence[str | Path], format: str | None = None) -> Timeline | Samples | Told:
    """What others measured: a profile becomes a Timeline, a benchmark's table Samples, another log Told.

    paths : a file, several files of one run (one per rank), or folders of them.
    format : a name in :data:`FORMATS`; None looks at the content: a reader that refuses hands on to the next format
        that the files look like, and where all refuse the error says why each did.

    Raises :class:`TraceError` for a file that cannot be read, and for files of different formats.
    """
    files_given = files.files_of(paths)
    if format is not None:
        return _as_far(_read_as(_named(format, files_given[0]), files_given), files_given)
    alike = {path: candidates(path) for path in files_given}
    rows = [row for row in alike[files_given[0]] if all(row in format_rows for format_rows in alike.values())]
    refused: dict[str, TraceError] = {}
    empty: Samples | None = None
    for row in rows:
        try:
            answer = _read_as(row, files_given)
        except TraceError as error:
            refused[row.what] = error
            continue
        if not isinstance(answer, Samples) or answer.rows or len(rows) == 1:
            return _as_far(_beside_table(answer, empty), files_given)
        empty = empty or answer  # a table's header without rows may be a few words in a log of another kind
    if empty is not None:
        return _as_far(empty, files_given)
    refusal = _mixed(alike) or _refusal(files_given[0], refused)
    if "cut off" not in str(refusal) and any(map(files.is_cut, files_given)):
        raise TraceError(f"{refusal}; the file is cut off")
    raise refusal


def _beside_table(answer: Timeline | Samples | Told, table: Samples | None) -> Timeline | Samples | Told:
    """What another reader says of files with a benchmark's table, and which of its rows could not be taken."""
    if table is None or isinstance(answer, Timeline | Samples):
        return answer
    return msgspec.structs.replace(answer, skipped={**answer.skipped, **table.skipped})


def _as_far(answer: Timeline | Samples | Told, paths: Sequence[Path]) -> Timeline | Samples | Told:
    """What logs say, and that it ends where a file of them is cut off; a profile says so itself."""
    if isinstance(answer, Timeline) or not any(map(files.is_cut, paths)):
        return answer
    skipped = {**answer.skipped, "the end of a log that is cut off": 1}
    if isinstance(answer, Samples):
        return dataclasses.replace(answer, skipped=skipped)
    return msgspec.structs.replace(answer, skipped=skipped)


def _named(name: str, path: Path) -> Format:
    """A format that can be read, by its name. Raises :class:`TraceError`."""
    if name not in FORMATS:
        raise TraceError(f"no trace format {name!r}; {nearest(name, FORMATS)}")
    if FORMATS[name].read is None:
        raise TraceError(f"{path}: the format {name!r} can only be written")
    return FORMATS[name]


def _mixed(alike: Mapping[Path, list[Format]]) -> TraceError | None:
    """What to say of files that look most like different formats; None where they are of one."""
    first, *other_paths = alike
    for path in other_paths:
        if alike[path][0] is not alike[first][0]:
            other_kind = alike[path][0].what
            first_kind = alike[first][0].what
            return TraceError(f"{path} is a {other_kind}, {first} a {first_kind}; read them one at a time")
    return None


def _read_as(row: Format, paths: Sequence[Path]) -> Timeline | Samples | Told:
    if row.read is None:
        raise TraceError(f"{paths[0]}: the format {row.name!r} can only be written")
    try:
        return row.read(paths)
    except ValueError as wrong:
        if "integer string conversion" not in str(wrong):  # Python's own limit, wherever a format has a number
            raise
        raise TraceError(f"{paths[0]}: not a {row.what}: a whole number has thousands of digits") from None


def _refusal(path: Path, refused: Mapping[str, TraceError]) -> TraceError:
    """One error of all readers' reasons; of one reader, its own; of a known file that none reads, what it is."""
    if told := unread.advice(Head(files.head(path))):
        return TraceError(f"{path}: {told}")
    if len(refused) == 1:
        return next(iter(refused.values()))
    reasons = (f"as a {format_name}: {str(error).removeprefix(f'{path}: ')}" for format_name, error in refused.items())
    return TraceError(f"{path}: {'; '.join(reasons)}; --format names one")
