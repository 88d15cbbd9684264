"""A group of commands that imports a command when it is asked for: none needs what the others import."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import click

from clustersim.core.errors import ClusterSimError, nearest
from clustersim.core.paths import checkout


class Commands(click.Group):
    """A group that offers the nearest name for a misspelt command.

    where : name -> module of this package, ``"run"``, and what it is called there if not the same, ``"listing:list_"``;
        ``"evidence/..."`` is a module beside the tests, which only a checkout has.
    """

    def __init__(self, *args: Any, where: Mapping[str, str], **named: Any) -> None:
        super().__init__(*args, **named)
        self.where = where

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Those of ``where`` in its order, then others by name."""
        return [*self.where, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name; None where there is none."""
        if cmd_name not in self.where:
            return super().get_command(ctx, cmd_name)
        module, _, name = self.where[cmd_name].partition(":")
        if module.startswith("evidence/"):
            return _of_checkout(cmd_name, module.removeprefix("evidence/"), name)
        command: click.Command = getattr(import_module(f"clustersim.app.cli.{module}"), name or module)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command named first. Raises :class:`click.UsageError`."""
        if args and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(f"no command {args[0]!r}; {nearest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


def _of_checkout(word: str, module: str, name: str) -> click.Command:
    """A command that reads tables of published runs: they, and it, are in a checkout only."""
    root = checkout()
    if root is None:
        return click.Command(
            word,
            callback=partial(_only_in_a_checkout, word),
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
            short_help="In a checkout only.",
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    command: click.Command = getattr(import_module(f"tests.evidence.{module}"), name)
    return command


def _only_in_a_checkout(word: str) -> None:
    raise ClusterSimError(f"{word}: reads tables that only a checkout of the source has; run it from one")
