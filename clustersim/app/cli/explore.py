"""``clustersim explore``: a page on localhost with a scenario's knobs, and what each change does."""

from __future__ import annotations

import click


@click.command(short_help="Change a scenario in a browser and see at once what it does.")
@click.argument("scenario")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port on 127.0.0.1; 0 is a free one.")
@click.option("--no-browser", is_flag=True, help="Print the address, and open no browser.")
def explore(scenario: str, port: int, no_browser: bool) -> None:
    """Serve a page with the knobs of SCENARIO (a .toml file, or the name of a shipped one) until Ctrl-C.

    Each change is played, in about a second, and shown beside what was there before: the verdict, the figures, where
    the time goes, who did what when, memory. The page copies the command that gives the same, and saves the changed
    scenario. Only this machine can reach it, and only with the address that is printed.
    """
    from clustersim.app.cli.keys import schema
    from clustersim.app.explore.server import serve

    def ready(address: str) -> None:
        """Say the address, and open it unless that is not wanted."""
        click.echo(f"{address} (Ctrl-C ends it)")
        if not no_browser:
            import webbrowser

            webbrowser.open(address)

    serve(scenario, schema("scenario"), port, ready)
