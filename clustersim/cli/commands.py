"""A group of commands that imports a command when it is asked for: none needs what the others import."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from clustersim.errors import nearest


class Commands(click.Group):
    """A group that offers the nearest name for a misspelt command.

    where : name -> module of this package, ``"run"``, and what it is called there if not the same, ``"listing:list_"``.
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
        found: click.Command = getattr(import_module(f"clustersim.cli.{module}"), name or module)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command named first. Raises :class:`click.UsageError`."""
        if args and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(f"no command {args[0]!r}; {nearest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)
