"""The help of commands: options in panels, their names whole, and the examples that end the docstring."""

from __future__ import annotations

import inspect
import re
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup


class _PanelHelp:
    """Prints the help of a command or a group."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        """Print usage, description, options, commands and examples; a name is neither cut nor wrapped."""
        text, _, examples = inspect.cleandoc(self.help or "").partition("\n\nExamples:\n")
        console, panels = Console(highlight=False), dict[str, list[tuple[str, str]]]()
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                pair = r"--\1" if param.default is False else r"--\1\n--no-\1"
                names = re.sub(r"--(\S+) / --no-\1$", pair, re.sub(r"<list\[(.+)\]>", r"<\1>", record[0]))
                words = re.sub(r"\[default: \((.+)\)\]", r"[default: \1]", record[1])
                panels.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append((names, words))
        for name in self.list_commands(ctx) if isinstance(self, TyperGroup) else ():
            command = self.get_command(ctx, name)
            if not command.hidden:
                panels.setdefault("Commands", []).append((name, command.get_short_help_str(limit=200)))
        if examples:
            panels["Examples"] = [(line, "") for line in inspect.cleandoc(examples).splitlines()]
        console.print(Padding(Text(self.get_usage(ctx), style="bold"), 1))
        for paragraph in filter(None, text.split("\n\n")):
            console.print(Padding(Text(" ".join(paragraph.split())), (0, 1, 1, 1)))
        for title, rows in panels.items():
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(no_wrap=True, style="cyan")
            table.add_column(overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))
            console.print(Panel(table, title=title, title_align="left", border_style="dim"))


class Command(_PanelHelp, TyperCommand):
    """A command of which the help is in panels."""


class Group(_PanelHelp, TyperGroup):
    """A group of commands with help of the same form."""
