"""The ``clustersim`` command. Each command is a thin front: it reads words, calls one function, prints its result.

Exit codes: 0, done; 2, input that cannot be used, with one line on stderr that says what would be right. Results go to
stdout, progress and errors to stderr, so ``--json`` output can be piped.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

import click

from clustersim.cli.bench import bench
from clustersim.cli.calibrate import calibrate
from clustersim.cli.campaign import campaign
from clustersim.cli.campaign_cases import campaign_cases
from clustersim.cli.capture import capture
from clustersim.cli.check import check
from clustersim.cli.claims import claims
from clustersim.cli.collective import collective
from clustersim.cli.compare import compare_strategies
from clustersim.cli.compare_runs import compare
from clustersim.cli.describe import describe
from clustersim.cli.evidence import evidence
from clustersim.cli.exchange import export_config, import_
from clustersim.cli.explain import explain
from clustersim.cli.explore import explore
from clustersim.cli.export import export
from clustersim.cli.lessons import lessons
from clustersim.cli.listing import list_, schema_
from clustersim.cli.memory import memory
from clustersim.cli.new import new
from clustersim.cli.plan import plan
from clustersim.cli.plot import plot
from clustersim.cli.replay import replay
from clustersim.cli.report import report
from clustersim.cli.run import run
from clustersim.cli.sensitivity import sensitivity
from clustersim.cli.sweep import sweep
from clustersim.cli.trace import trace
from clustersim.cli.validate import validate
from clustersim.cli.variation import variation
from clustersim.errors import ClusterSimError, nearest


class Commands(click.Group):
    """A group that offers the nearest name for a misspelt command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order a newcomer needs them."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command named first. Raises :class:`click.UsageError`."""
        if args and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(f"no command {args[0]!r}; {nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="clustersim")
def cli() -> None:
    """Simulate distributed training on GPU clusters, checked against real measurements."""


for _command in (
    run,
    explain,
    explore,
    compare,
    report,
    plot,
    export,
    list_,
    new,
    import_,
    export_config,
    describe,
    schema_,
    compare_strategies,
    sweep,
    plan,
    variation,
    campaign,
    sensitivity,
    memory,
    check,
    collective,
    trace,
    replay,
    capture,
    calibrate,
    validate,
    claims,
    bench,
    lessons,
):
    cli.add_command(_command)
validate.add_command(campaign_cases)
validate.add_command(evidence)


LONGEST = 1500
"""Characters of an error."""


def _line(text: str) -> str:
    """An error as one line that a terminal can show: long words cut, nothing that moves the cursor."""
    words = (word if len(word) <= 200 else f"{word[:90]}...{word[-30:]}" for word in text.split())
    line = "".join(c if c.isprintable() else "?" for c in " ".join(words))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 203]}...{line[-200:]}"


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    try:
        code = cli.main(args=args, prog_name="clustersim", standalone_mode=False)
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
