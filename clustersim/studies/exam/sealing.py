"""The answer of an exam, kept where a glance does not read it: compressed, encoded, and with a digest that says whether
it is the one that was sealed. It is no secret: who wants to read it can."""

from __future__ import annotations

import base64
import hashlib
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from clustersim.core.errors import ClusterSimError
from clustersim.core.texts import decoded

if TYPE_CHECKING:
    from clustersim.studies.exam.drawing import PlantedIncident

LARGEST = 2**16


class ExamAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What went wrong and where: a kind of ``[[incident]]``, and a ``rank``, a ``host`` or a ``port``.

    other : of two NICs whose cables are swapped, the other one, which is as right.
    """

    kind: str
    rank: int | None = None
    host: str | None = None
    port: str | None = None
    other: str | None = None

    @property
    def place(self) -> tuple[int | None, str | None, str | None]:
        """Where."""
        return self.rank, self.host, self.port


class _Seal(msgspec.Struct, frozen=True):
    """What the file holds: ``sha256`` of ``salt`` and the answer's JSON, and that JSON compressed and encoded."""

    sha256: str
    salt: str
    answer: str


def answer_of(exam: PlantedIncident) -> ExamAnswer:
    """The right answer, in the words of the files."""
    incident = exam.incident
    from clustersim.studies.exam.drawing import port_name

    node = incident.get("node")
    return ExamAnswer(
        kind=str(incident["kind"]),
        rank=incident.get("rank"),
        host=None if node is None else f"node{node}",
        port=exam.port or None,
        other=port_name(str(incident["other"])) if "other" in incident else None,
    )


def sealed(answer: ExamAnswer, seed: int) -> bytes:
    """The file's bytes; the same answer and seed give the same."""
    text = msgspec.json.encode(answer)
    salt = hashlib.sha256(f"salt {seed}".encode()).hexdigest()[:16]
    packed = base64.b64encode(zlib.compress(salt.encode() + text, 9)).decode()
    return msgspec.json.format(msgspec.json.encode(_Seal(_digest(salt, text), salt, packed)), indent=2) + b"\n"


def opened(path: Path) -> ExamAnswer:
    """The answer in a sealed file. Raises :class:`ClusterSimError` for one that is none, or that somebody changed."""
    try:
        data = path.read_bytes()[:LARGEST]
    except OSError as error:
        raise ClusterSimError(f"{path}: cannot be read: {error.strerror}; an exam's folder has one") from None
    seal = decoded(data, _Seal, f"{path}: is no sealed answer", ClusterSimError)
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(base64.b64decode(seal.answer, validate=True), LARGEST)
        text = text.removeprefix(seal.salt.encode())
    except (ValueError, zlib.error):
        raise ClusterSimError(f"{path}: the sealed answer is damaged; write the exam anew") from None
    if _digest(seal.salt, text) != seal.sha256:
        raise ClusterSimError(f"{path}: the sealed answer was changed; write the exam anew")
    return decoded(text, ExamAnswer, f"{path}: is no sealed answer", ClusterSimError)


def _digest(salt: str, text: bytes) -> str:
    return hashlib.sha256(salt.encode() + text).hexdigest()
