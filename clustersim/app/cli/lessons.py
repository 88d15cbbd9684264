"""``clustersim lessons``: copy the notebooks out of the package, and say how to open them."""

from __future__ import annotations

from pathlib import Path

import click

from clustersim.app.cli.common import OUT_FOLDER, working
from clustersim.app.cli.tables import stdout


@click.command(short_help="Copy the lessons (notebooks) to a folder.")
@click.argument("folder", type=OUT_FOLDER, default=Path("lessons"))
@click.option("--force", is_flag=True, help="Overwrite copies that you changed.")
@click.option("--run", "execute", is_flag=True, help="Run all of them, and keep their output.")
def lessons(folder: Path, force: bool, execute: bool) -> int:
    """Copy the lessons to FOLDER (lessons) and say how to open them."""
    from clustersim.app import lessons as shipped

    copies = shipped.copy(folder, force=force)
    out = stdout()
    failures = 0
    for lesson in copies:
        failed = ""
        if execute:
            with working(f"running {lesson.name}") as progress:
                failed = shipped.run(lesson, progress)
            failures += bool(failed)
        state = f"  FAILED: {failed}" if failed else "  ran" if execute else ""
        out.say(f"{folder / lesson.name}  {lesson.title}{state}")
    out.say(f"\nOpen them with:  jupyter lab {copies[0].path}")
    out.say("(pip install 'clustersim[notebooks]' brings it; VS Code opens them too)")
    return 1 if failures else 0
