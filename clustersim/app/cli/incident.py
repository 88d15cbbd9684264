"""``clustersim incident``: exams of faults, and their grades."""

from __future__ import annotations

from pathlib import Path

import click

from clustersim.app.cli.common import OUT_FOLDER, PATH, json_option, print_json, working
from clustersim.core.errors import ClusterSimError


@click.group(short_help="Plant a fault, write what tools would have seen, and grade answers.")
def incident() -> None:
    """Exams: a fault is planted in a run and its files are written; who finds it, a person or a program, is graded."""


@incident.command("new")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Which of many incidents; the same seed, the same.")
@click.option(
    "--difficulty", metavar="DIFFICULTY", default="easy", help="easy: large, all files; hard: small, half the ranks'."
)
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder for the exam; it must not be there yet.")
def new(seed: int, difficulty: str, out: Path) -> None:
    """Write an exam: the files that a job with a planted fault would have left, the question, and a sealed answer."""
    from clustersim.studies import exam

    with working(f"playing incident {seed}"):
        files = exam.write_exam(exam.planted(seed, difficulty), out)
    counts = ", ".join(f"{len(paths)} {kind}" for kind, paths in files.items())
    click.echo(f"wrote {out}/question.txt, {out}/files ({counts}) and {out}/answer.sealed")


@incident.command("grade")
@click.argument("folder", type=PATH)
@click.argument("answer", type=PATH)
@json_option
def grade(folder: Path, answer: Path, as_json: bool) -> None:
    """Grade ANSWER, a JSON file such as {"kind": "slow_gpu", "rank": 3} or what `clustersim diagnose --json` wrote, by
    the sealed answer of the exam in FOLDER."""
    from clustersim.studies import exam
    from clustersim.studies.exam.grading import MOST, given_answer

    if not folder.is_dir():
        raise ClusterSimError(f"{folder}: no such folder; `clustersim incident new` writes one")
    result = exam.graded(given_answer(answer), exam.opened(folder / "answer.sealed"))
    if as_json:
        print_json(result.to_dict())
        return
    right = " of ".join(str(part) for part in (result.right.kind, *result.right.place) if part is not None)
    click.echo(f"{result.points} of {MOST}: the cause is {_word(result.cause)}, the place is {_word(result.place)}")
    click.echo(f"it was {right}")


def _word(right: bool) -> str:
    return "right" if right else "wrong"
