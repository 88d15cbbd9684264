"""What ``clustersim capture`` wrote: its collectives as Samples, finished parts and interrupted ones alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from clustersim.core.errors import TraceError
from clustersim.core.texts import decoded, shown
from clustersim.files.traces import files
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.samples import Sample, Samples, SampleSieve, dtype_of, joined, kind_of

VERSION = 1
"""Of the layout; a newer one is refused."""

Row = dict[str, Any]


def sniff(head: Head) -> Likeness:
    """Whether this is a part of a capture, whose first line holds no list of records, or its provenance."""
    named = "clustersim_capture" in head.members
    provenance = head.holds("asked") and head.lists("machines", "versions")
    heading = head.is_row and {"backend", "device", "ranks"} <= head.members.keys()
    return likeness(named=named, shaped=named and (provenance or heading))


def read(paths: Sequence[Path]) -> Samples:
    """The collectives of a capture's folder. Raises :class:`TraceError` where there are none, or of a newer layout."""
    about: dict[Path, Row] = {}
    for path in paths:
        if path.name == "provenance.json":
            about[path.parent] = provenance(path)
    parts = []
    other_parts = []
    for path in paths:
        if path.name == "provenance.json":
            continue
        rows, broken = lines(path)
        if rows[0].get("part") == "collectives":
            parts.append(_samples(path, rows, broken, about.get(path.parent, {})))
        else:
            other_parts.append(str(rows[0].get("part")))
    if not parts:
        raise TraceError(
            f"{paths[0]}: no collectives in this capture ({', '.join(other_parts) or 'nothing measured yet'})"
        )
    return joined(parts)


def provenance(path: Path) -> Row:
    """What a capture says of itself and its machines. Raises :class:`TraceError`."""
    about = _json(path, files.text(path))
    machines = about.get("machines", [])
    if not isinstance(machines, list) or not all(map(_is_machine, machines)):
        raise TraceError(f"{path}: $.machines is no list of machines, each with versions, gpus and cores")
    for name in ("ranks", "nodes"):
        if not isinstance(about.get(name, 1), int):
            raise TraceError(f"{path}: $.{name} is {shown(about[name])}, no whole number")
    return about


def _is_machine(table: Any) -> bool:
    kinds = {"versions": dict, "gpus": list, "cores": int, "threads": int}
    return isinstance(table, dict) and all(isinstance(table.get(name, kind()), kind) for name, kind in kinds.items())


def lines(path: Path) -> tuple[list[Row], int]:
    """All rows of a part, the header first, and how many lines were cut off. Raises :class:`TraceError`."""
    text = files.text(path).splitlines()
    rows: list[Row] = []
    broken = 0
    for line in filter(str.strip, text):
        try:
            rows.append(_json(path, line))
        except TraceError:
            broken += 1  # the run ended inside this line
            if not rows:
                raise
    if not rows:
        raise TraceError(f"{path}: an empty file; a capture's part begins with a line of JSON")
    if rows[0].get("clustersim_capture") != VERSION:
        raise TraceError(f"{path}: a capture of layout {rows[0].get('clustersim_capture')!r}; this reads {VERSION}")
    return rows, broken


def _json(path: Path, text: str) -> Row:
    return decoded(text, dict[str, Any], f"{path}: not a capture's line of JSON", TraceError)


def _samples(path: Path, rows: list[Row], broken: int, about: Row) -> Samples:
    sieve = SampleSieve()
    head = rows[0]
    for _ in range(broken):
        sieve.skip("a line that is cut off")
    machine: Row = next(iter(about.get("machines", [])), {})
    versions = machine.get("versions", {})
    device = next(iter(machine.get("gpus", [])), machine.get("cpu", ""))
    version = versions.get("nccl") or (f"torch {versions['torch']}" if "torch" in versions else versions.get("mpi", ""))
    for number, row in enumerate(rows[1:], start=2):
        if "skipped" in row:
            continue  # the capture's own words, in the notes
        try:
            sample = Sample(
                kind=_kind(row),
                nbytes=float(row["size"]),
                seconds=row["time"] * 1e-6,
                ranks=_count(row, "ranks"),
                dtype=dtype_of(row["type"]) or "fp32",
                redop=row["redop"].replace("none", ""),
                nodes=_count(row, "nodes"),
                fastest=row["time_min"] * 1e-6,
                at_once=_count(row, "groups_at_once"),
                count=_count(row, "iterations"),
                skew=float("nan"),
                launch="process_per_gpu",
                version=version,
                device=device,
                env=_settings(head, row),
                platform=str(head.get("device", "")),
                source=f"{path}:{number}",
                case=f"{path} {row['kind']} {row['layout']}",
            )
            busbw = float(row.get("busbw", float("nan"))) * 1e9
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            sieve.skip(f"a row that is not a measured collective ({error})")
            continue
        if row.get("#wrong"):
            sieve.skip("a row whose results came out wrong")
        else:
            sieve.add(sample, busbw)
    return sieve.done(str(path), _notes(rows, path))


def _kind(row: Row) -> str:
    """Raises ValueError for what is no collective."""
    kind = kind_of(row["kind"])
    if kind is None:
        raise ValueError(f"kind is {shown(row['kind'])}, no collective")
    return kind


def _count(row: Row, name: str) -> int:
    """Raises ValueError for what is no whole number."""
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {shown(value)}, no whole number")
    return value


def _settings(head: Row, row: Row) -> str:
    """The library, and what was chosen of it: ``"backend=mpi transport=tcp algorithm=3"``."""
    settings = {"backend": head.get("backend"), "transport": row.get("transport"), "algorithm": row.get("algorithm")}
    return " ".join(f"{name}={value}" for name, value in settings.items() if value or name == "backend")


def _notes(rows: list[Row], path: Path) -> Iterator[str]:
    if path.name.endswith(".partial"):
        yield f"{path}: the run ended before this part was finished"
    yield from (f"not captured: {row['skipped']}" for row in rows[1:] if "skipped" in row)
