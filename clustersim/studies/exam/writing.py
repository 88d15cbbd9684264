"""A planted incident -> the folder of an exam: files that tools would have left, the question, the sealed answer."""

from __future__ import annotations

from pathlib import Path

from clustersim.core.errors import ClusterSimError
from clustersim.core.outputs import writing
from clustersim.files import slices
from clustersim.studies.exam.drawing import PlantedIncident
from clustersim.studies.exam.evidence import TracesByKind, write_traces
from clustersim.studies.exam.sealing import answer_of, sealed

QUESTION = "question.txt"
ANSWER = "answer.sealed"
FILES = "files"


def write_exam(exam: PlantedIncident, folder: Path) -> TracesByKind:
    """Write the exam into a folder that is not there yet: ``files/``, ``question.txt`` and ``answer.sealed``.

    Raises :class:`ClusterSimError` where the folder is there, or cannot be written.
    """
    if folder.exists():
        raise ClusterSimError(f"{folder}: is there already; name a folder that is not (at --out)")
    with writing(folder):
        (folder / FILES).mkdir(parents=True)
        kept = write_traces(exam, folder / FILES)
        slices.replace_file(folder / QUESTION, _question(exam).encode())
        slices.replace_file(folder / ANSWER, sealed(answer_of(exam), exam.seed))
    return kept


def _question(exam: PlantedIncident) -> str:
    world = len(exam.hosts)
    machines = len(set(exam.hosts))
    what = "makes this job slow" if exam.hang is None else "makes this job hang"
    return (
        f"A job of {world} ranks on {machines} machines. What {what}, and where? The files that its tools left are in "
        f"{FILES}/.\n\nWrite your answer as JSON, the kind of the fault and the rank, host or port where it is:\n"
        '{"kind": "slow_gpu", "rank": 3}\n{"kind": "slow_host", "host": "node1"}\n'
        '{"kind": "dead_link", "port": "node0/mlx5_0"}\n{"kind": "congestion"}\n'
        "and let it be graded: clustersim incident grade FOLDER ANSWER\n\n"
        "Kinds: `clustersim describe --keys scenario` lists them at incident[].kind.\n"
    )
