"""The contract that every reader of a trace or a log keeps (:mod:`clustersim.testing` has those of other rows)."""

from __future__ import annotations

import tempfile
from math import inf
from pathlib import Path

import numpy as np

from clustersim.core.contract import require
from clustersim.core.errors import TraceError
from clustersim.core.timeline import Timeline
from clustersim.files.traces import FORMATS, Format, Samples, Told, candidates
from clustersim.files.traces.files import files_of


def check_reader(row: Format, *examples: str | Path) -> None:
    """Its files are known by their content and read; an empty, a foreign and a cut one give one clear error or less.

    Parameters
    ----------
    row : a :class:`~clustersim.files.traces.Format` that is read. examples : a file each, or a
        folder of the files of one run.

    Raises :class:`AssertionError` where the contract is broken.
    """
    if row.sniff is None or row.read is None:
        raise AssertionError(f"{row.name}: a format that is read needs sniff and read")
    require(bool(examples), row, "no example to read")
    lent = row.name not in FORMATS
    if lent:
        FORMATS.register(row)
    require(FORMATS[row.name] is row, row, "another format has this name")
    try:
        for path in map(Path, examples):
            _check_example(row, path)
    finally:
        if lent:
            FORMATS.withdraw(row.name)


def _check_example(row: Format, path: Path) -> None:
    paths = files_of(path)
    for part in paths:
        likely = candidates(part)[0]
        require(likely is row, row, f"{part.name} looks more like {likely.name}")
    answer = row.read(paths) if row.read else None
    kinds = (Timeline, Samples, Told)
    require(isinstance(answer, kinds), row, f"{path.name} is read as a {type(answer).__name__}")
    if isinstance(answer, Timeline):
        _check_timeline(row, path.name, answer)
    elif isinstance(answer, Samples):
        _check_samples(row, path.name, answer)
    content = paths[0].read_bytes()
    broken = {"empty": b"", "foreign": b"no log\n" * 20, "cut": content[: len(content) // 2]}
    for how, data in broken.items():
        _reads_or_refuses(row, paths[0].name, how, data)


def _check_timeline(row: Format, name: str, timeline: Timeline) -> None:
    """Its ranks are those of its world, and nothing ends before it begins."""
    world = timeline.world_size
    require(world >= 1, row, f"{name} has a world of {world} ranks")
    ranks = {rank for ranks in timeline.rank_sets for rank in ranks.tolist()}
    strange = sorted(rank for rank in ranks if not 0 <= rank < world)
    require(not strange, row, f"{name} has rank {strange[:1]}, of a world of {world}")
    times = np.array([timeline.row_ready, timeline.row_start, timeline.row_end])
    require(bool(np.isfinite(times).all()), row, f"{name} has a span whose time is no number")
    require(bool((timeline.row_end >= timeline.row_start).all()), row, f"{name} has a span that ends before it begins")


def _check_samples(row: Format, name: str, samples: Samples) -> None:
    """They are times of something, and of a group that can be (of 0 where the source does not say)."""
    for sample in samples.rows:
        require(sample.ranks >= 0, row, f"{name} has a sample of {sample.ranks} ranks")
        require(sample.last < max(sample.ranks, 1), row, f"{name} has rank {sample.last}, of a group of {sample.ranks}")
        require(0 < sample.seconds < inf, row, f"{name} has a sample of {sample.seconds} s")
        require(0 <= sample.nbytes < inf, row, f"{name} has a sample of {sample.nbytes} bytes")


def _reads_or_refuses(row: Format, name: str, how: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        try:
            if row.read is not None:
                row.read([path])
        except TraceError:
            return
        except Exception as wrong:
            words = f"{type(wrong).__name__}: {wrong}"
            raise AssertionError(f"{row.name}: {how} {name}: a TraceError is wanted, not {words}") from wrong
