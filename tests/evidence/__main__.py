"""``python -m tests.evidence``: what predictions are judged by."""

from __future__ import annotations

import click

from clustersim.app.cli import main
from tests.evidence.bench_command import bench
from tests.evidence.bytes_command import torch_bytes
from tests.evidence.calibrations_command import calibrations
from tests.evidence.claims_command import claims
from tests.evidence.evidence_command import campaign_cases, evidence
from tests.evidence.expert_command import experts
from tests.evidence.gpus_command import gpus
from tests.evidence.incidents_command import gloo_faults, incidents
from tests.evidence.predictions_command import moved, predict, score
from tests.evidence.steps_command import memory, room, steps


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def cli() -> None:
    """Predictions beside published figures; what the simulator itself costs."""


COMMANDS = (
    evidence,
    experts,
    gpus,
    steps,
    memory,
    room,
    torch_bytes,
    campaign_cases,
    calibrations,
    claims,
    incidents,
    gloo_faults,
    bench,
    score,
    predict,
    moved,
)
for command in COMMANDS:
    cli.add_command(command)

if __name__ == "__main__":
    main(command=cli, name="python -m tests.evidence")
