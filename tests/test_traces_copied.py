"""Logs as they come from elsewhere: copied from a web page, written by PowerShell, packed by others than gzip."""

from __future__ import annotations

import bz2
import gzip
import html
import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest
from test_step_timers import megatron
from test_traces_samples import NEW

from clustersim.core.errors import TraceError
from clustersim.files import traces
from clustersim.files.traces.samples import Sample, Samples
from clustersim.files.traces.told import TrainingLog

BARS = "".join(f"  4%|#  | {20 * i}/500 [{40 * i // 60:02d}:{40 * i % 60:02d}<16:00,  2.00s/it]\n" for i in range(1, 5))
COPIES = {
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16, the other end first": lambda text: b"\xfe\xff" + text.encode("utf-16-be"),
    "blanks that break no line": lambda text: text.replace(" ", "\xa0").encode(),
    "HTML": lambda text: html.escape(text).replace(" ", "&nbsp;").encode(),
    "HTML's page": lambda text: f"<pre>\n{html.escape(text)}</pre>".encode(),
}


@pytest.mark.parametrize("copy", COPIES)
def test_steps_of_a_copied_log(tmp_path: Path, copy: str):
    path = tmp_path / "log"
    for text, seconds in ((megatron(), 1.2325), (BARS, 2.0)):
        path.write_bytes(COPIES[copy](text))
        read = traces.read(path)
        assert isinstance(read, TrainingLog)
        assert read.step_time_s == pytest.approx(seconds)


def told(row: Sample) -> tuple[object, ...]:
    """What a row says, but not in which line."""
    return row.kind, row.nbytes, row.seconds, row.ranks, row.dtype, row.nodes, row.device


@pytest.mark.parametrize("copy", COPIES)
def test_collectives_of_a_copied_log(tmp_path: Path, copy: str):
    path = tmp_path / "log"
    path.write_text(NEW)
    plain = traces.read(path)
    path.write_bytes(COPIES[copy](NEW))
    read = traces.read(path)
    assert isinstance(plain, Samples)
    assert isinstance(read, Samples)
    assert plain.rows
    assert [told(row) for row in read.rows] == [told(row) for row in plain.rows]


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress])
def test_logs_of_other_packers_are_what_they_hold(tmp_path: Path, pack):
    path = tmp_path / "log"
    path.write_text(megatron(""))
    plain = traces.read(path)
    path.write_bytes(pack(megatron("").encode()))
    assert traces.read(path).times == plain.times
    path.write_bytes(pack(megatron("")[:200].encode()) + pack(megatron("")[200:].encode()))
    assert traces.read(path).times == plain.times
    path.write_bytes(pack(b"text")[:-6])
    with pytest.raises(TraceError, match=r"cut off|no format"):
        traces.read(path)
    path.write_bytes(pack(b"text" * 100)[:20] + bytes(range(60)))
    with pytest.raises(TraceError, match="damaged"):
        traces.read(path)


@pytest.mark.parametrize("wide", ["utf-16-le", "utf-16-be"])
def test_wide_text_without_its_mark_is_read(tmp_path: Path, wide: str):
    path = tmp_path / "log"
    path.write_bytes(megatron("").encode(wide))
    read = traces.read(path)
    path.write_text(megatron(""))
    assert isinstance(read, TrainingLog)
    assert read.times == traces.read(path).times
    assert read.times


@pytest.mark.parametrize(("packed", "name"), [(b"\x28\xb5\x2f\xfd\x20\x00", "zstd")])
def test_what_is_packed_otherwise_is_named(tmp_path: Path, packed: bytes, name: str):
    path = tmp_path / "log"
    path.write_bytes(packed)
    with pytest.raises(TraceError, match=f"packed by {name}, which is not read; unpack it"):
        traces.read(path)


def zipped(**members: bytes) -> bytes:
    """A zip, as pages that take no other files make people pack them."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.log", data)
    return out.getvalue()


def test_the_one_log_in_a_zip_is_read_and_of_several_none(tmp_path: Path):
    path = tmp_path / "log.zip"
    text = megatron("").encode()
    (tmp_path / "log").write_bytes(text)
    plain = traces.read(tmp_path / "log")
    assert isinstance(plain, TrainingLog)
    for data in (text, gzip.compress(text)):
        path.write_bytes(zipped(job=data))
        read = traces.read(path)
        assert isinstance(read, TrainingLog)
        assert read.times == plain.times
    path.write_bytes(zipped(a=text, b=text))
    with pytest.raises(TraceError, match=r"a zip of 2 files \(a.log, b.log\); unpack it"):
        traces.read(path)
    path.write_bytes(zipped(job=bytes(range(256)) * 9).replace(b"\x01\x02\x03", b"\x01\x02\x04"))
    with pytest.raises(TraceError):
        traces.read(path)


@pytest.mark.parametrize("packed", [False, True])
def test_an_archive_of_tar_is_unpacked_by_people(tmp_path: Path, packed: bool):
    (tmp_path / "log").write_text(megatron(""))
    path = tmp_path / "log.tar"
    with tarfile.open(path, "w:gz" if packed else "w") as archive:
        archive.add(tmp_path / "log", "log")
    with pytest.raises(TraceError, match="a tar archive, which is not read; unpack it"):
        traces.read(path)


def test_a_small_log_that_is_cut_off_is_known_by_what_is_there(tmp_path: Path):
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(megatron("").encode())[:-9])
    read = traces.read(path)
    assert isinstance(read, TrainingLog)
    assert read.times
    assert "the end of a log that is cut off" in read.skipped
