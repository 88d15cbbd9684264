"""``clustersim diagnose``: which rank, machine or port makes a job slow or hang."""

from __future__ import annotations

from pathlib import Path

import click

from clustersim.app.cli.common import PATH, json_option, print_json, working


@click.command(short_help="Say which rank, machine or port makes a job slow or hang.")
@click.argument("files", nargs=-1, required=True, type=PATH)
@json_option
def diagnose(files: tuple[Path, ...], as_json: bool) -> None:
    """Give one ranked answer over all FILES that a job left (files or folders, in any mixture): Flight Recorder dumps,
    PyTorch profiles, logs of steps, of PyTorch's watchdog, of torchrun and of NCCL, and counters of NICs.

    Each file says how likely what it shows would be for every cause at every place; together they make the confidence.
    Where two candidates are close, the answer says what evidence would decide.
    """
    from clustersim.studies import diagnosis

    with working(f"reading {len(files)} file(s)"):
        answer = diagnosis.diagnose(files)
    if as_json:
        print_json(answer.to_dict())
    else:
        click.echo("\n".join(answer.lines()))
