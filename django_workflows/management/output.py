"""What the commands print: rich tables, through the command's own stdout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.management.base import BaseCommand
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table


def console_of(options: Mapping[str, Any]) -> Console:
    """A console that heeds the command's --no-color."""
    return Console(no_color=options["no_color"] or None, highlight=False, markup=False, emoji=False)


def show(command: BaseCommand, renderable: RenderableType, options: Mapping[str, Any]) -> None:
    """Print it where the command prints."""
    console = console_of(options)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    with console.capture() as capture:
        console.print(renderable)
    lines = capture.get().rstrip().splitlines()
    command.stdout.write("\n".join(line.rstrip() for line in lines) + "\n\n")


def new_table(*columns: str, **how: Any) -> Table:
    """A table that never cuts a name short, however narrow the terminal."""
    table = Table(title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, **how)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
