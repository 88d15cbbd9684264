"""The ``clustersim`` command. Each command is a thin front: it reads words, calls one function, prints its result.

Exit codes: 0, done; 2, input that cannot be used, with one line on stderr that says what would be right. Results go to
stdout, progress and errors to stderr, so ``--json`` output can be piped.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence

import click

from clustersim.app.cli.commands import Commands
from clustersim.core.errors import ClusterSimError

COMMANDS = {
    "run": "run",
    "explain": "explain",
    "explore": "explore",
    "compare": "compare_runs:compare",
    "report": "report",
    "plot": "plot",
    "export": "export",
    "list": "listing:list_",
    "new": "new",
    "import": "exchange:import_",
    "export-config": "exchange:export_config",
    "trace-model": "trace_model",
    "describe": "describe",
    "schema": "listing:schema_",
    "compare-strategies": "compare:compare_strategies",
    "sweep": "sweep",
    "plan": "plan",
    "variation": "variation",
    "campaign": "campaign",
    "sensitivity": "sensitivity",
    "memory": "memory",
    "check": "check",
    "collective": "collective",
    "trace": "trace",
    "diagnose": "diagnose",
    "incident": "incident",
    "replay": "replay",
    "capture": "capture",
    "calibrate": "calibrate",
    "validate": "validate",
    "claims": "evidence/claims_command:claims",
    "bench": "evidence/bench_command:bench",
    "lessons": "lessons",
}
"""Where each command is, in the order a newcomer needs them."""


@click.group(
    cls=Commands, where=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(package_name="clustersim")
def cli() -> None:
    """Simulate distributed training on GPU clusters, checked against real measurements."""


LONGEST = 1500
"""Characters of an error."""


def _line(text: str) -> str:
    """An error as one line that a terminal can show: long words cut, nothing that moves the cursor."""
    pieces = (word if len(word) <= 200 else f"{word[:90]}...{word[-30:]}" for word in text.split())
    line = "".join(c if c.isprintable() else "?" for c in " ".join(pieces))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 203]}...{line[-200:]}"


def _say_warning(message: Warning | str, *_where: object, **_line: object) -> None:
    """A warning in one line, without the place in the code that gave it."""
    click.echo(f"warning: {message}", err=True)


def main(args: Sequence[str] | None = None, command: click.Command = cli, name: str = "clustersim") -> None:
    """Run a command line and leave with its exit code; what a person wrote wrongly is one line."""
    warnings.showwarning = _say_warning
    try:
        code = command.main(args=args, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        sys.exit(2)
    except (click.ClickException, ClusterSimError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo("error: " + _line(text), err=True)
        sys.exit(2)
    except MemoryError:
        click.echo("error: this needs more memory than there is; use fewer ranks, steps or scenarios", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has gone: keep the interpreter from failing again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES):  # of a name on the command line
            click.echo("error: " + _line(f"{error.filename}: {error.strerror}"), err=True)
            sys.exit(2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        # What stdout is written to has no room; as with a reader that has gone, the interpreter must not fail again.
        click.echo(f"error: stdout: cannot be written: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)
